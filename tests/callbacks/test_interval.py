"""``train_time_interval`` ends at the same step on all ranks, measured by the clock of the first rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roomier import checkpoint
from roomier.callbacks import ModelCheckpoint
from roomier.callbacks.model_checkpoint import Interval
from roomier.checkpoint.agree import all_ranks
from roomier.core.ranks import Ranks
from tests.callbacks.conftest import Scripted
from tests.ranks.pool import RankPool


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def test_single_rank_checks_the_clock_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("roomier.callbacks.model_checkpoint.time", clock)
    interval, over = Interval(10.0), []
    interval.begin()
    for step in range(40):
        clock.now_s += 1
        if interval.is_over(Ranks()):
            over.append(step)
    assert over == [9, 19, 29, 39]


def check_in_each_step(num_steps: int, step_s: float, length_s: float) -> tuple[list[int], int]:
    from roomier.callbacks import model_checkpoint as module

    clock, num_checks = Clock(), 0
    module.time = clock  # type: ignore[assignment]
    ranks = all_ranks()
    from_zero = ranks.from_zero

    def counting(value: Any) -> Any:
        nonlocal num_checks
        num_checks += 1
        return from_zero(value)

    ranks.from_zero = counting  # type: ignore[method-assign]
    interval, over = Interval(length_s), []
    interval.begin()
    for step in range(num_steps):
        clock.now_s += step_s * (1 + 3 * dist.get_rank())  # clocks differ between ranks
        if interval.is_over(ranks):
            over.append(step)
    return over, num_checks


def test_ranks_agree_with_few_checks(on_ranks: RankPool) -> None:
    results = on_ranks(2, check_in_each_step, 2000, 1.0, 500.0)
    assert results[0] == results[1]
    over, num_checks = results[0]
    assert over == [499, 999, 1499, 1999]
    assert num_checks < 60


def save_by_time(folder: Path) -> list[int]:
    from roomier import Trainer

    rank = dist.get_rank()
    real = time.monotonic
    time.monotonic = lambda: real() * (1 + rank)
    saver = ModelCheckpoint(dirpath=folder, train_time_interval={"seconds": 0.3}, save_top_k=-1)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=60,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )

    class Slow(Scripted):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.02)

    trainer.fit(Slow(), [torch.ones(2, 2)] * 200)
    return sorted(checkpoint.peek(path)["progress"]["global_step"] for path in saver_paths(saver))


def saver_paths(saver: ModelCheckpoint) -> set[str]:
    return saver._ledger.paths


@pytest.mark.more
def test_ranks_with_different_clocks_save_at_the_same_steps(on_ranks: RankPool, tmp_path: Path) -> None:
    steps = on_ranks(2, save_by_time, tmp_path)
    assert steps[0] == steps[1]
    assert 2 <= len(steps[0]) <= 60
