"""Tests that each memory technique matches the plain loop under each strategy, or is rejected by the Plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from roomier.core.errors import PlanError
from tests.covering import covering, few
from tests.parallel.parity import Setup, distance, train_bare, train_on_ranks
from tests.parallel.tasks import Language, TiedLanguage
from tests.ranks.pool import RankPool

LEVERS: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full"},
    "every second": {"activation_checkpointing": "every_n"},
    "selective": {"activation_checkpointing": "selective"},
    "budget": {"activation_checkpointing": 0.5},
    "offload": {"offload": {"activations": "cpu"}},
    "chunked loss": {"chunked_loss": 5},
    "step in backward": {"step_in_backward": True},
    "attention": {"attention": "math"},
}
REJECTED = {("step in backward", "ddp"), ("step in backward", "zero1")}
# On a CPU, offloading cannot help a budget. step_in_backward with a budget is rejected because gradients are clipped.
REJECTED_PAIRS = {("budget", "offload"), ("budget", "step in backward")}
NUM_STEPS = 4
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
PAIRS = [
    (one, other)
    for one, other in combinations(LEVERS, 2)
    if not LEVERS[one].keys() & LEVERS[other].keys()  # both techniques set the policy of the blocks
    and (one, other) not in REJECTED_PAIRS
]


def compared(setup: Setup, tied: bool = False) -> tuple[float, float, str]:
    make_task = TiedLanguage if tied else Language
    apart = distance(train_on_ranks(make_task, setup), train_bare(make_task, setup))
    return apart.losses, apart.weights, apart.worst


def check_levers_under(on_ranks: RankPool, strategy: str, levers: list[str]) -> None:
    num_ranks, shard_size = (4, 2) if strategy == "hsdp" else (2, None)
    setups = {
        lever: Setup(strategy, num_ranks, shard_size, levers=LEVERS[lever], num_steps=NUM_STEPS) for lever in levers
    }
    for lever in levers:
        if (lever, strategy) in REJECTED:
            with pytest.raises(PlanError, match="Use strategy="):
                setups.pop(lever).plan()
    results = on_ranks.each(num_ranks, compared, [(setup,) for setup in setups.values()])
    for lever, by_rank in zip(setups, results, strict=True):
        for losses, weights, worst in by_rank:
            assert losses < 1e-5, lever
            assert weights < 1e-5, (lever, worst)


@pytest.mark.parametrize("strategy", few(STRATEGIES, 2))
def test_techniques_under_a_strategy_are_exact_or_rejected(on_ranks: RankPool, strategy: str) -> None:
    """Each technique runs under two or more strategies, and each strategy with three or more techniques."""
    chosen = covering(list(LEVERS), STRATEGIES, per_row=2)
    levers = [each.values[0] for each in chosen if each.values[1] == strategy and not each.marks]
    assert len(levers) > 2
    check_levers_under(on_ranks, strategy, levers)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_technique_under_a_strategy_is_exact_or_rejected(on_ranks: RankPool, strategy: str) -> None:
    check_levers_under(on_ranks, strategy, list(LEVERS))


@pytest.mark.more
def test_techniques_in_mixed_precision_are_as_accurate_as_none(on_ranks: RankPool) -> None:
    """Norms and weights of matrix products are all-gathered in two dtypes, even if a block is recomputed."""
    plain = Setup("zero3", precision="bf16-mixed", num_steps=NUM_STEPS)
    setups = [plain, *(replace(plain, levers=levers) for levers in LEVERS.values())]
    without, *results = on_ranks.each(2, compared, [(setup,) for setup in setups])
    bound = without[0][0]
    for lever, by_rank in zip(LEVERS, results, strict=True):
        for losses, _, _ in by_rank:
            assert losses < max(2 * bound, 5e-3), lever


def check_pairs(on_ranks: RankPool, pairs: list[tuple[tuple[str, str], bool]]) -> None:
    setup = Setup(num_ranks=1, micro_batch=4, clip=0.5, num_steps=NUM_STEPS)
    calls = [(replace(setup, levers=LEVERS[one] | LEVERS[other]), tied) for (one, other), tied in pairs]
    for pair, [(losses, weights, worst)] in zip(pairs, on_ranks.each(1, compared, calls), strict=True):
        assert losses < 1e-5, pair
        assert weights < 1e-5, (pair, worst)


@pytest.mark.more
def test_two_techniques_together_are_exact(on_ranks: RankPool) -> None:
    """Every second pair has a tied output layer."""
    check_pairs(on_ranks, [(pair, bool(index % 2)) for index, pair in enumerate(PAIRS)])


@pytest.mark.slow
def test_two_techniques_together_are_exact_with_and_without_a_tied_layer(on_ranks: RankPool) -> None:
    check_pairs(on_ranks, [(pair, tied) for pair in PAIRS for tied in (False, True)])


def test_all_compatible_techniques_together_are_exact(on_ranks: RankPool) -> None:
    together = {**LEVERS["full"], **LEVERS["offload"], **LEVERS["chunked loss"], **LEVERS["step in backward"]}
    setups = [Setup(strategy, levers=together, num_steps=NUM_STEPS) for strategy in ("zero2", "zero3")]
    for by_rank in on_ranks.each(2, compared, [(setup,) for setup in setups]):
        for losses, weights, worst in by_rank:
            assert losses < 1e-5
            assert weights < 1e-5, worst
