"""Dry runs of several ranks, compared with the same step on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.planner import Case, run
from roomier.core.ranks import Ranks
from roomier.core.world import World
from tests.covering import few
from tests.ranks.pool import RankPool

MOST = 0.0005  # relative; allocations of scalars
FEW = [
    Case("gpt_tied", "zero3", 2, "full", "bf16-mixed", "adamw8bit"),
    Case("gpt_tied", "zero1", 2, "selective", "32-true", "adamw", accumulate=2),
    Case("gpt_tied", "ddp", 2, "none", "bf16-mixed", "adamw", accumulate=2),
    Case("gpt_tied", "zero2", 2, "none", "32-true", "adafactor"),
]


def rows_of(cases: list[Case]) -> list[dict[str, Any]]:
    """Run dry runs on ranks. The process group and the meshes of the ranks must not change."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return run(cases, Ranks(World(rank, size, rank, 0, size)))


def check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert "error" in row, row
        assert row["error"] <= MOST, row


@pytest.mark.parametrize("case", few(FEW), ids=str)
def test_the_forecast_on_two_ranks_equals_the_peak(on_ranks: RankPool, case: Case) -> None:
    check(on_ranks(2, rows_of, [case])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [*((name, size) for name in ("ddp", "zero1", "zero2", "zero3") for size in (2, 4)), ("hsdp", 4)],
)
def test_every_strategy_precision_and_recompute_policy(on_ranks: RankPool, strategy: str, num_ranks: int) -> None:
    cases = [
        Case("gpt_tied", strategy, num_ranks, recompute, precision, "adamw", accumulate)
        for recompute in ("none", "full", "selective")
        for precision in ("32-true", "bf16-mixed")
        for accumulate in (1, 2)
    ]
    check(on_ranks(num_ranks, rows_of, cases, timeout_s=600)[0])
