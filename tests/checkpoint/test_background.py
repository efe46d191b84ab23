"""Saving in the background: waits, results and errors."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from roomier import checkpoint
from roomier.checkpoint import BackgroundSaver, saving
from roomier.checkpoint.agree import all_ranks
from roomier.core.errors import CheckpointError
from tests.ranks.pool import RankFailed, RankPool


def state_of(step: int) -> dict[str, Any]:
    return {"module": {"w": torch.full((5, 3), float(step))}, "progress": {"global_step": step, "list": [step]}}


class Gate:
    """Block a writer until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.num_waiting = 0
        write = saving._write_file

        def write_later(*arguments: Any) -> Any:
            self.num_waiting += 1
            assert self.opened.wait(30)
            return write(*arguments)

        monkeypatch.setattr(saving, "_write_file", write_later)


def test_start_returns_before_the_files_are_written_and_copies_the_state(tmp_path: Path, monkeypatch: Any) -> None:
    gate, saver, state = Gate(monkeypatch), BackgroundSaver(), state_of(1)
    saver.start(tmp_path / "c", state)
    state["module"]["w"].zero_()
    state["progress"]["list"].append("later")
    assert saver.is_busy
    assert saver.num_ended == 0
    assert not saver.wait(timeout_s=0.01)
    assert checkpoint.find_last(tmp_path) is None
    gate.opened.set()
    assert saver.wait()
    assert (saver.num_started, saver.num_ended, saver.is_busy) == (1, 1, False)
    loaded = checkpoint.load(tmp_path / "c")
    assert torch.equal(loaded["module"]["w"], torch.ones(5, 3))
    assert loaded["progress"] == {"global_step": 1, "list": [1]}
    saver.close()


def test_saves_run_one_at_a_time_and_reuse_buffers(tmp_path: Path, monkeypatch: Any) -> None:
    saver = BackgroundSaver()
    for step in range(3):
        saver.start(tmp_path / str(step), state_of(step))
    saver.wait()
    places = {name: tensor.data_ptr() for name, tensor in saver._buffers.items()}
    gate = Gate(monkeypatch)
    saver.start(tmp_path / "3", state_of(3))
    assert {name: tensor.data_ptr() for name, tensor in saver._buffers.items()} == places
    assert [path.name for path in checkpoint.list_complete(tmp_path)] == ["0", "1", "2"]
    starting = threading.Thread(target=saver.start, args=(tmp_path / "4", state_of(4)))
    starting.start()
    time.sleep(0.1)
    assert starting.is_alive(), "the previous save is still running"
    gate.opened.set()
    starting.join(30)
    saver.wait()
    assert [checkpoint.load(tmp_path / str(step))["progress"]["global_step"] for step in range(5)] == [*range(5)]


def test_an_error_is_raised_by_the_next_call_and_the_old_checkpoint_remains(tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint.save(tmp_path / "c", state_of(1))
    saver = BackgroundSaver()
    with monkeypatch.context() as context:
        context.setattr(saving.TensorFile, "append", no_space)
        saver.start(tmp_path / "c", state_of(2))
        assert saver._save is not None
        assert saver._save.exception(30) is not None
    with pytest.raises(CheckpointError, match="No space left on device"):
        saver.start(tmp_path / "d", state_of(3))
    assert os.listdir(tmp_path) == ["c"]
    assert checkpoint.load(tmp_path / "c")["progress"]["global_step"] == 1
    saver.start(tmp_path / "c", state_of(4))
    saver.wait()
    assert checkpoint.load(tmp_path / "c")["progress"]["global_step"] == 4


def test_a_state_that_cannot_be_saved_raises_immediately(tmp_path: Path) -> None:
    saver = BackgroundSaver()
    with pytest.raises(CheckpointError, match=r"state\['x'\]"):
        saver.start(tmp_path / "c", {"x": object()})
    assert not saver.is_busy


def no_space(*_: Any) -> None:
    raise OSError(28, os.strerror(28))


# On several ranks ---------------------------------------------------------------------------------------------------


def sharded_state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.full((7, 100), float(step)), mesh, [Shard(0)])
    return {"module": {"w": weight}, "progress": {"global_step": step}}


def train_while_saving(folder: Path) -> None:
    opened, write = threading.Event(), saving._write_file
    saving._write_file = lambda *each: (opened.wait(30), write(*each))[1]  # type: ignore[assignment]
    saver = BackgroundSaver(all_ranks())
    saver.start(folder / "a", sharded_state(1))
    total = torch.zeros(1)
    for step in range(50):  # training uses the default process group
        dist.all_reduce(total.fill_(step))
        assert float(total) == step * dist.get_world_size()
    assert checkpoint.find_last(folder) is None
    opened.set()
    saver.wait()
    saver.start(folder / "b", sharded_state(2))
    saver.wait()
    saver.close()


def test_ranks_train_while_they_save(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(2, train_while_saving, tmp_path)
    for name, step in (("a", 1), ("b", 2)):
        assert (checkpoint.load(tmp_path / name)["module"]["w"] == step).all()


def fail_in_background(folder: Path, failing: int) -> str:
    saver = BackgroundSaver(all_ranks())
    state = sharded_state(2)
    if dist.get_rank() == failing:
        saving.TensorFile.append = no_space  # type: ignore[method-assign,assignment]
    saver.start(folder / "c", state)
    with pytest.raises(CheckpointError) as caught:
        saver.wait()
    return str(caught.value)


@pytest.mark.more
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_the_background_is_raised_on_all_ranks(tmp_path: Path, on_ranks: RankPool, failing: int) -> None:
    checkpoint.save(tmp_path / "c", state_of(1))
    messages = on_ranks(2, fail_in_background, tmp_path, failing)
    assert messages[0] == messages[1]
    assert f"on rank {failing}" in messages[0]
    assert "No space left on device" in messages[0]
    assert os.listdir(tmp_path) == ["c"]
    assert checkpoint.load(tmp_path / "c")["progress"]["global_step"] == 1


def save_in_background_until_killed(folder: Path, victim: int, after_s: float) -> None:
    saver = BackgroundSaver(all_ranks())
    for step in range(1, 10_000):
        saver.start(folder / "last", sharded_state(step))
        saver.wait()
        if dist.get_rank() == 0:
            (folder / "next").write_text(str(step))
            os.replace(folder / "next", folder / "reported")  # a kill can interrupt write_text
        if step == 1:
            dist.barrier()  # the first save is reported before the kill
            if dist.get_rank() == victim:
                threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


@pytest.mark.more
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_during_a_background_save_leaves_the_last_checkpoint(
    tmp_path: Path, on_ranks: RankPool, victim: int
) -> None:
    for attempt in range(3):
        with pytest.raises(RankFailed):
            on_ranks(2, save_in_background_until_killed, tmp_path, victim, 0.2 + 0.1 * attempt)
    found = checkpoint.find_last(tmp_path)
    assert found is not None
    state = checkpoint.load(found)
    assert (state["module"]["w"] == state["progress"]["global_step"]).all()
    assert state["progress"]["global_step"] >= int((tmp_path / "reported").read_text())
