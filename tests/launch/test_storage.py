"""Runs on several ranks whose storage is slow, becomes read-only, or is shared with another run."""

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import roomier
from roomier import checkpoint
from roomier.callbacks import ModelCheckpoint
from roomier.core.errors import CheckpointError
from roomier.launch.environment import RANK_VARIABLES
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more

BATCHES = [torch.full((2, 4), number / 8) for number in range(8)]


class Model(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def trainer_of(root: Path, *callbacks: roomier.Callback, **keywords: Any) -> roomier.Trainer:
    return roomier.Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        **keywords,
    )


# A folder that becomes read-only --------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system that can be remounted. Skip the test if the file system cannot be mounted."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mount)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here (usually only root can): {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


class Remount(roomier.Callback):
    """Callback that makes the file system read-only before the sixth step."""

    def __init__(self, mount: Path) -> None:
        self.mount = mount

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5 and trainer.is_global_zero:
            subprocess.run(["mount", "-o", "remount,ro", str(self.mount)], check=True)


def fit_until_read_only(mount: Path, is_async: bool) -> str:
    saves = ModelCheckpoint(dirpath=mount / "kept", every_n_train_steps=2, save_top_k=-1, async_save=is_async)
    trainer = trainer_of(mount, saves, Remount(mount), strategy="zero2", devices=2, max_steps=8)
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(Model(), BATCHES * 2)
    return str(caught.value)


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_folder_that_becomes_read_only_ends_the_run_and_keeps_the_checkpoints(
    on_ranks: RankPool, disk: Path, is_async: bool
) -> None:
    for text in on_ranks(2, fit_until_read_only, disk, is_async):
        assert re.search(r"path=.*cannot be written: Read-only file system", text)
    complete = sorted(each for each in (disk / "kept").iterdir() if not each.name.startswith("."))
    steps = [checkpoint.load(each)["progress"]["global_step"] for each in complete]
    assert steps == [2, 4] or (is_async and steps == [2])  # the asynchronous save of step 4 can fail as well


# A disk that is slow to flush -----------------------------------------------------------------------------------------


class Slow(roomier.Callback):
    """Callback that blocks ``fsync`` in background threads until the fourth step, and stores the step at which each
    flush returns."""

    def __init__(self) -> None:
        self.may_return, self.steps_at_flush = threading.Event(), list[int]()
        self.step, flush = 0, os.fsync

        def slow_flush(descriptor: int) -> None:
            flush(descriptor)
            if threading.current_thread() is not threading.main_thread():
                assert self.may_return.wait(60.0)
                self.steps_at_flush.append(self.step)

        os.fsync = slow_flush

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.step = trainer.global_step
        if self.step == 3:
            self.may_return.set()


def fit_with_a_slow_disk(root: Path) -> tuple[list[int], int]:
    slow = Slow()
    saves = ModelCheckpoint(dirpath=root / "kept", every_n_train_steps=2, save_top_k=-1, async_save=True)
    trainer = trainer_of(root, saves, slow, strategy="zero2", devices=2, max_steps=4)
    trainer.fit(Model(), BATCHES)
    return slow.steps_at_flush, trainer.global_step


def test_training_continues_while_an_asynchronous_save_flushes(on_ranks: RankPool, tmp_path: Path) -> None:
    zero, one = on_ranks(2, fit_with_a_slow_disk, tmp_path)
    assert (zero[1], one[1]) == (4, 4)
    assert zero[0][0] == one[0][0] == 3
    for step in (2, 4):
        assert checkpoint.load(tmp_path / "kept" / f"epoch=0-step={step}")["progress"]["global_step"] == step


# Two runs with one folder ---------------------------------------------------------------------------------------------


class TakeTurns(roomier.Callback):
    """Starts two runs together. Run 1 takes each step, with its save, after run 0."""

    def __init__(self, notes: Path, run: int) -> None:
        self.notes, self.run = notes, run

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.reach(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.reach(trainer.global_step)

    def reach(self, step: int) -> None:
        (self.notes / f"{self.run}-{step}").touch()
        if self.run == 1:
            self.wait_for(f"0-{min(step + 1, 4)}")
        elif step == 0:
            self.wait_for("1-0")

    def wait_for(self, name: str) -> None:
        while not (self.notes / name).exists():
            time.sleep(0.01)


def fit_independently(root: Path) -> tuple[str, torch.Tensor]:
    run = int(os.environ["RANK"])
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    torch.manual_seed(run)
    saves = ModelCheckpoint(dirpath=root / "kept", every_n_train_steps=2, save_top_k=-1)
    model = Model()
    trainer_of(root / "runs", saves, TakeTurns(root, run), strategy="single", max_steps=4).fit(model, BATCHES)
    return saves.best_model_path, model.net.weight.detach()


def test_two_runs_with_one_dirpath_keep_their_checkpoints(on_ranks: RankPool, tmp_path: Path) -> None:
    found = on_ranks(2, fit_independently, tmp_path, joins=False)
    names = [f"epoch=0-step={step}{version}" for step in (2, 4) for version in ("", "-v1")]
    assert sorted(each.name for each in (tmp_path / "kept").iterdir()) == names
    for path, weight in found:
        assert torch.equal(checkpoint.load(path)["module"]["net.weight"], weight)
