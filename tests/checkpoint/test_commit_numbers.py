"""The newest checkpoint is the checkpoint that was committed last, regardless of the machine's clock."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier import checkpoint
from roomier.checkpoint import record
from roomier.core.ranks import Ranks
from tests.ranks.pool import RankPool

HOUR_NS = 3600 * 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Time in nanoseconds that new checkpoints record."""
    now = [1_000 * HOUR_NS]
    monkeypatch.setattr("roomier.checkpoint.saving.time.time_ns", lambda: now[0])
    return now


def save(path: Path, step: int) -> Path:
    checkpoint.save(path, {"w": torch.full((3,), float(step)), "progress": {"global_step": step}})
    return path


def numbers_in(folder: Path) -> dict[str, int]:
    return {path.name: record.read_record(path).commit_number for path in checkpoint.list_complete(folder)}


def rewrite(path: Path, **values: Any) -> None:
    """Change values in a record. None removes a value."""
    content = json.loads((path / "run.json").read_bytes())["content"]
    content = {key: value for key, value in {**content, **values}.items() if value is not None}
    data = json.dumps(content, separators=(",", ":")).encode()
    (path / "run.json").write_bytes(b'{"crc32": "%08x", "content": ' % zlib.crc32(data) + data + b"}\n")


def make_old(path: Path, hour: int) -> Path:
    """Convert a checkpoint to format 2, which has no commit number."""
    rewrite(path, format_version=2, commit_number=None, saved_at_ns=hour * HOUR_NS)
    return path


def test_a_clock_that_is_set_back_does_not_change_the_order(tmp_path: Path, clock: list[int]) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step={step}", step)
        clock[0] -= HOUR_NS
    assert checkpoint.find_last(tmp_path) == tmp_path / "step=3"
    assert numbers_in(tmp_path) == {"step=1": 1, "step=2": 2, "step=3": 3}


class Line(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_to(root: Path, max_steps: int) -> int:
    """Resume the last run under ``root`` and return the step at which it resumed."""
    started: list[int] = []

    class Started(roomier.Callback):
        def on_train_start(self, trainer: roomier.Trainer, pl_module: Any) -> None:
            started.append(trainer.global_step)

    keep_all = roomier.callbacks.ModelCheckpoint(save_top_k=-1, every_n_train_steps=1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = roomier.Trainer(
        default_root_dir=root, max_epochs=None, max_steps=max_steps, callbacks=[keep_all, Started()], **quiet
    )
    trainer.fit(Line(), [torch.ones(4, 2)] * 10, ckpt_path="last")
    return started[0]


def test_a_run_resumes_at_its_last_step_after_the_clock_was_set_back(tmp_path: Path, clock: list[int]) -> None:
    fit_to(tmp_path, 2)
    clock[0] -= 24 * HOUR_NS
    assert [fit_to(tmp_path, max_steps) for max_steps in (4, 6, 8)] == [2, 4, 6]


def test_numbers_order_the_folders_of_several_runs(tmp_path: Path, clock: list[int]) -> None:
    first, second = (tmp_path / f"version_{number}" / "checkpoints" for number in (0, 1))
    for step in (1, 2, 3):
        save(first / f"step={step}", step)
    clock[0] -= HOUR_NS
    assert checkpoint.find_last(tmp_path) == first / "step=3"
    assert checkpoint.find_last(save(second / "step=1", 1).parents[2]) == second / "step=1"
    resumed = save(first / "step=4", 4)
    assert checkpoint.find_last(tmp_path) == resumed
    assert checkpoint.find_last(second.parent) == second / "step=1"
    assert record.read_record(resumed).commit_number == 5


def test_a_copy_of_a_run_is_older_than_what_is_committed_after_it(tmp_path: Path, clock: list[int]) -> None:
    first, copied = (tmp_path / f"version_{number}" / "checkpoints" for number in (0, 1))
    for step in (1, 2):
        save(first / f"step={step}", step)
    shutil.copytree(first, copied)
    clock[0] -= HOUR_NS
    assert checkpoint.find_last(tmp_path) in (first / "step=2", copied / "step=2")
    for folder, step in ((first, 3), (copied, 3), (first, 4)):
        assert checkpoint.find_last(save(folder / f"step={step}", step).parents[2]) == folder / f"step={step}"


def save_many(folder: Path, num_saves: int) -> None:
    rank = torch.distributed.get_rank()
    for step in range(1, num_saves + 1):
        save_alone(folder / f"rank={rank}-step={step}", step)


def save_alone(path: Path, step: int) -> None:
    checkpoint.save(path, {"progress": {"global_step": step}}, Ranks())


@pytest.mark.more
def test_two_processes_that_share_a_folder(tmp_path: Path, on_ranks: RankPool) -> None:
    on_ranks(2, save_many, tmp_path, 10)
    numbers = numbers_in(tmp_path)
    for rank in (0, 1):
        own = [numbers[f"rank={rank}-step={step}"] for step in range(1, 11)]
        assert own == sorted(set(own)), "the numbers of one process increase"
    newest = checkpoint.find_last(tmp_path)
    assert newest is not None
    assert numbers[newest.name] == max(numbers.values())


def test_equal_numbers_are_ordered_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two processes that commit at the same moment find the same numbers.
    monkeypatch.setattr("roomier.checkpoint.saving.next_commit_number", lambda target: 7)
    for step in (2, 10, 9):
        save(tmp_path / str(step), step)
    assert checkpoint.find_last(tmp_path) == tmp_path / "10"


def test_checkpoints_without_numbers_are_loaded_and_found_by_their_steps(tmp_path: Path) -> None:
    folder = tmp_path / "version_0" / "checkpoints"
    for step, hour in ((8, 50), (9, 70), (10, 60)):  # the clock was set back after step 9
        make_old(save(folder / f"step={step}", step), hour)
    assert checkpoint.find_last(tmp_path) == folder / "step=10"
    assert [path.name for path in checkpoint.list_complete(folder)] == ["step=8", "step=9", "step=10"]
    checkpoint.verify(folder / "step=9")
    assert checkpoint.load(folder / "step=9")["w"].tolist() == [9.0] * 3
    # Steps of different runs cannot be compared.
    newer_run = make_old(save(tmp_path / "version_1" / "checkpoints" / "step=1", 1), 80)
    assert checkpoint.find_last(tmp_path) == newer_run
    assert checkpoint.find_last(save(folder / "step=11", 11).parents[2]) == folder / "step=11"
    assert record.read_record(folder / "step=11").commit_number == 1


def test_a_folder_that_claims_the_largest_number_does_not_stop_new_commits(tmp_path: Path) -> None:
    rewrite(save(tmp_path / "step=1", 1), commit_number=record.MAX_COMMIT_NUMBER)
    for step in (2, 3, 4):
        assert checkpoint.find_last(save(tmp_path / f"step={step}", step).parent) == tmp_path / f"step={step}"
    rewrite(tmp_path / "step=1", commit_number=record.MAX_COMMIT_NUMBER + 1)
    assert checkpoint.find_last(tmp_path) == tmp_path / "step=4"
