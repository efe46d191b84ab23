"""A rank is killed during a fit in stages. The run resumes with the bits of a run without a fault."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import roomier
from roomier import checkpoint
from roomier.callbacks import Callback, ModelCheckpoint
from roomier.checkpoint.find import find_last
from tests.pipeline.test_loop import Net, loader, trainer_of
from tests.ranks.pool import RankFailed, RankPool
from tests.resume.conftest import differing

KILLED_AT = 3


class Kill(Callback):
    """Callback that kills a rank in the middle of step ``KILLED_AT``, or while the checkpoint of this step is saved."""

    def __init__(self, rank: int, hook: str) -> None:
        self.rank, self.hook = rank, hook

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 * KILLED_AT - 1:  # the second micro-batch of the step
            self._kill(trainer, "step")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step == KILLED_AT:
            self._kill(trainer, "save")

    def _kill(self, trainer: Any, hook: str) -> None:
        if (trainer.global_rank, self.hook) == (self.rank, hook):
            os.kill(os.getpid(), signal.SIGKILL)


def fit(folder: Path, num_ranks: int, strategy: str, fault: tuple[int, str] | None, ckpt_path: str | None) -> None:
    roomier.seed_everything(3 if ckpt_path is None else 4)
    saver = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    trainer = trainer_of(
        str(folder),
        num_ranks,
        strategy={"name": strategy, "pipeline_parallel_size": 2},
        gradient_clip_val=0.5,
        max_steps=6,
        callbacks=[saver, *([Kill(*fault)] if fault else [])],
    )
    trainer.fit(Net(), DataLoader(loader().dataset, batch_size=2, drop_last=True), ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "end")


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "fault"),
    [(2, "ddp", (1, "save")), pytest.param(4, "zero2", (3, "step"), marks=pytest.mark.more)],
)
def test_a_run_resumes_after_a_rank_was_killed(
    on_ranks: RankPool, tmp_path: Path, num_ranks: int, strategy: str, fault: tuple[int, str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    on_ranks(num_ranks, fit, whole, num_ranks, strategy, None, None)
    with pytest.raises(RankFailed, match=f"rank {fault[0]} failed first(?s:.*)was killed by SIGKILL"):
        on_ranks(num_ranks, fit, parts, num_ranks, strategy, fault, None)
    assert str(find_last(parts)).endswith(f"epoch=0-step={KILLED_AT - 1}")
    on_ranks(num_ranks, fit, parts, num_ranks, strategy, None, "last")
    expected, found = checkpoint.load(whole / "end"), checkpoint.load(parts / "end")
    for section in ("module", "optimizers"):
        assert list(differing(expected[section], found[section], section)) == []
