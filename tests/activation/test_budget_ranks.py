"""Budgets on two ranks: both ranks make the same choice, even for different batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roomier.core.ranks import Ranks
from roomier.core.world import World
from tests.activation.budgets import Language, Net, engine_for, measured_peak, recompute_of, take_step, tokens
from tests.covering import few
from tests.ranks.pool import RankPool

NUM_RANKS = 2
STRATEGIES = ["ddp", pytest.param("zero1", marks=pytest.mark.slow), "zero2", "zero3"]


def make_ranks() -> Ranks:
    rank = torch.distributed.get_rank()
    return Ranks(World(rank, NUM_RANKS, rank, 0, NUM_RANKS))


def train_on_rank(strategy: str, budget: float | str, dropout: float = 0.1) -> dict[str, Any]:
    """Train with batches that are twice as large on rank 1."""
    ranks = make_ranks()
    module = Net(Language(num_layers=4, dropout=dropout))
    engine = engine_for(module, budget, ranks, strategy=strategy, devices=NUM_RANKS)
    torch.manual_seed(1 + ranks.world.rank)
    num_samples = 4 * (1 + ranks.world.rank)
    losses = [take_step(engine, module, [tokens(num_samples, seed=10 * step + ranks.world.rank)]) for step in range(4)]
    window = [tokens(num_samples)]
    found = {"losses": losses, "peak_bytes": measured_peak(engine, module, window)}
    losses.append(take_step(engine, module, window))
    recompute = recompute_of(engine)
    if budget != "none":
        found["keeps"] = [str(block.keep) for block in recompute.blocks]
        found["predicted_bytes"] = recompute.predicted_bytes
    return found


@pytest.mark.parametrize("strategy", few(STRATEGIES))
def test_ranks_with_unequal_batches_make_the_same_choice_and_meet_the_budget(on_ranks: RankPool, strategy: str) -> None:
    plain, half = on_ranks.each(NUM_RANKS, train_on_rank, [(strategy, "none"), (strategy, 0.5)])
    assert half[0]["keeps"] == half[1]["keeps"]
    assert len(set(half[0]["keeps"])) > 1
    assert half[0]["predicted_bytes"] == half[1]["predicted_bytes"]
    peaks = [each["peak_bytes"] for each in half]
    assert max(peaks) <= 1.03 * half[0]["predicted_bytes"]
    assert max(peaks) == pytest.approx(half[0]["predicted_bytes"], rel=0.05)
    assert max(peaks) < max(each["peak_bytes"] for each in plain)
    for mine, theirs in zip(half, plain, strict=True):
        assert mine["losses"] == theirs["losses"]


def fail_on_rank(strategy: str) -> str:
    try:
        train_on_rank(strategy, "1MiB")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.more
def test_a_budget_that_is_too_small_raises_on_every_rank(on_ranks: RankPool) -> None:
    first, second = on_ranks(NUM_RANKS, fail_on_rank, "zero2")
    assert first == second
    assert "activation.budget='1.0 MiB'" in first


def grow_on_rank() -> tuple[list[str], list[str]]:
    ranks = make_ranks()
    module = Net(Language(num_layers=4))
    engine = engine_for(module, 0.5, ranks, strategy="zero2", devices=NUM_RANKS)
    for _ in range(3):
        take_step(engine, module, [tokens(4)])
    before = [str(block.keep) for block in recompute_of(engine).blocks]
    for _ in range(2):
        take_step(engine, module, [tokens(4 * (1 + ranks.world.rank))])
    return before, [str(block.keep) for block in recompute_of(engine).blocks]


@pytest.mark.more
def test_a_larger_batch_on_one_rank_is_reported_and_keeps_the_choice(
    on_ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    for before, after in on_ranks(NUM_RANKS, grow_on_rank):
        assert before == after
    printed = [line for line in capsys.readouterr().out.splitlines() if "was measured with" in line]
    assert len(printed) == 1
    assert "(132,)" in printed[0]
    assert "(264,)" in printed[0]
