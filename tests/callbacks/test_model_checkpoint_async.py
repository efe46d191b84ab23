"""ModelCheckpoint(async_save=True): training continues, and only committed checkpoints have a name."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier import Callback, checkpoint
from roomier.callbacks import ModelCheckpoint
from roomier.checkpoint import saving
from roomier.core.errors import CheckpointError
from tests.callbacks.conftest import Batches, Scripted
from tests.ranks.pool import RankPool
from tests.resume.conftest import differing
from tests.resume.reshard import NUM_STEPS, train


class Slow(Callback):
    """Callback that delays writers until training step ``last`` and records the best path in each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int, saver: ModelCheckpoint) -> None:
        self.opened = threading.Event()
        self.last, self.saver = last, saver
        self.named: list[str] = []
        write = saving._write_file

        def write_later(*arguments: Any) -> Any:
            assert self.opened.wait(30)
            return write(*arguments)

        monkeypatch.setattr(saving, "_write_file", write_later)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.named.append(os.path.basename(self.saver.best_model_path))
        if trainer.global_step >= self.last:
            self.opened.set()


def test_training_continues_while_a_checkpoint_is_written(
    make_trainer: Any, batches: Batches, monkeypatch: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=2, save_last=True, async_save=True)
    slow = Slow(monkeypatch, 3, saver)
    trainer = make_trainer(saver, slow, max_steps=5)
    trainer.fit(Scripted(), batches)
    assert slow.named[:3] == ["", "", ""], "step 3 was reached while the checkpoint of step 2 was written"
    assert os.path.basename(saver.best_model_path) == "epoch=0-step=5", "the last checkpoint is saved at the end"
    assert os.readlink(tmp_path / "kept" / "last") == "epoch=0-step=5"
    assert [path.name for path in checkpoint.list_complete(tmp_path / "kept")] == ["epoch=0-step=5"]
    assert checkpoint.load(saver.best_model_path)["progress"]["global_step"] == 5


def test_asynchronous_checkpoint_equals_a_synchronous_one(make_trainer: Any, batches: Batches, tmp_path: Path) -> None:
    states = []
    for is_async in (False, True):
        torch.manual_seed(0)
        folder = tmp_path / str(is_async)
        saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, async_save=is_async)
        make_trainer(saver, max_steps=6).fit(Scripted(), batches)
        states.append({path.name: checkpoint.load(path) for path in checkpoint.list_complete(folder)})
    waited, asynchronous = states
    assert len(asynchronous) == 6
    for name, state in waited.items():
        for section in ("module", "optimizers", "random", "progress", "data", "results", "schedulers"):
            assert list(differing(asynchronous[name][section], state[section], section)) == []
        [own], [expected] = (list(each["callbacks"].values()) for each in (asynchronous[name], state))
        assert {**own, "dirpath": None} == {**expected, "dirpath": None}, "the ledger lists its own checkpoint"


def test_failed_write_ends_the_fit_at_a_later_save_point(
    make_trainer: Any, batches: Batches, monkeypatch: Any, tmp_path: Path
) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    saver = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=4, async_save=True)
    steps: list[int] = []

    class Fails(Callback):
        def on_save_point(self, trainer: Any, pl_module: Any) -> None:
            steps.append(trainer.global_step)
            save = trainer.run.saves.background and trainer.run.saves.background._save
            if trainer.global_step in (7, 9) and save:
                save.exception(30)
            if trainer.global_step == 7:  # the checkpoint of step 4 is complete
                monkeypatch.setattr(saving.TensorFile, "append", no_space)

    trainer = make_trainer(saver, Fails(), max_steps=100, max_epochs=20)
    with pytest.raises(CheckpointError, match="No space left on device"):
        trainer.fit(Scripted(), batches)
    assert steps[-1] in (8, 9), "writing step 8 failed during step 8 or 9"
    assert os.path.basename(saver.best_model_path) == "epoch=0-step=4"
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["epoch=0-step=4"]


def test_signal_waits_for_the_pending_write(
    make_trainer: Any, batches: Batches, monkeypatch: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=2, async_save=True)

    class Signalled(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                assert trainer.run.saves.background.is_busy
                threading.Timer(0.2, slow.opened.set).start()
                os.kill(os.getpid(), signal.SIGTERM)

    slow = Slow(monkeypatch, 100, saver)
    trainer = make_trainer(saver, slow, Signalled(), max_steps=50)
    with pytest.raises(SystemExit):
        trainer.fit(Scripted(), batches)
    assert os.path.basename(saver.best_model_path) == "epoch=0-step=2"
    assert checkpoint.load(saver.best_model_path)["progress"]["global_step"] == 2
    found = checkpoint.find_last(tmp_path / "runs")
    assert found is not None
    assert checkpoint.load(found)["progress"]["global_step"] == 3


def test_asynchronous_save_after_a_fit_is_immediate(make_trainer: Any, batches: Batches, tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=2)
    trainer.fit(Scripted(), batches)
    committed: list[str] = []
    trainer.save_checkpoint(tmp_path / "c", asynchronous=True, when_committed=lambda: committed.append("done"))
    assert committed == ["done"]
    checkpoint.verify(tmp_path / "c")


@pytest.mark.more
def test_asynchronous_save_on_ranks_equals_a_synchronous_one(on_ranks: RankPool, tmp_path: Path) -> None:
    options = {"every_n_train_steps": 1}
    waited = on_ranks(2, train, tmp_path / "a", "zero3", 2, NUM_STEPS, **options)[0]
    asynchronous = on_ranks(2, train, tmp_path / "b", "zero3", 2, NUM_STEPS, async_save=True, **options)[0]
    assert asynchronous["losses"] == waited["losses"]
    own, expected = (checkpoint.list_complete(Path(each["best"]).parent) for each in (asynchronous, waited))
    assert [path.name for path in own] == [path.name for path in expected]
    assert len(own) == NUM_STEPS
    for own_path, expected_path in zip(own, expected, strict=True):
        our, their = checkpoint.load(own_path), checkpoint.load(expected_path)
        assert list(differing(our["module"], their["module"])) == []
        assert list(differing(our["optimizers"], their["optimizers"])) == []
