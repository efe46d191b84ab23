"""Tests that each memory technique matches the plain loop under each strategy, or is rejected by the Plan."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import pytest

from roomier.core.errors import PlanError
from tests.covering import covering
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
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
PAIRS = [
    (one, other)
    for one, other in combinations(LEVERS, 2)
    if not LEVERS[one].keys() & LEVERS[other].keys()  # both set the policy of the blocks
    and (one, other) not in REJECTED_PAIRS
]


def compared(setup: Setup, tied: bool = False) -> tuple[float, float, str]:
    make_task = TiedLanguage if tied else Language
    apart = distance(train_on_ranks(make_task, setup), train_bare(make_task, setup))
    return apart.losses, apart.weights, apart.worst


@pytest.mark.parametrize(("lever", "strategy"), covering(list(LEVERS), STRATEGIES, per_row=2))
def test_technique_under_a_strategy_is_exact_or_rejected(on_ranks: RankPool, lever: str, strategy: str) -> None:
    num_ranks, shard_size = (4, 2) if strategy == "hsdp" else (2, None)
    setup = Setup(strategy, num_ranks, shard_size, levers=LEVERS[lever], num_steps=6)
    if (lever, strategy) in REJECTED:
        with pytest.raises(PlanError, match="Use strategy="):
            setup.plan()
        return
    for losses, weights, worst in on_ranks(num_ranks, compared, setup):
        assert losses < 1e-5
        assert weights < 1e-5, worst


@cache
def bound_without_levers(on_ranks: RankPool) -> float:
    """Return the distance of the losses without levers from the bare loop."""
    losses: float = on_ranks(2, compared, Setup("zero3", precision="bf16-mixed", num_steps=6))[0][0]
    return losses


@pytest.mark.parametrize("lever", LEVERS)
def test_technique_in_mixed_precision_is_as_accurate_as_none(on_ranks: RankPool, lever: str) -> None:
    """Norms and weights of matrix products are all-gathered in two dtypes, also if a block is recomputed."""
    setup = Setup("zero3", precision="bf16-mixed", num_steps=6, levers=LEVERS[lever])
    bound = bound_without_levers(on_ranks)
    for losses, _, _ in on_ranks(2, compared, setup):
        assert losses < max(2 * bound, 5e-3)


@pytest.mark.parametrize(("pair", "tied"), covering([" + ".join(pair) for pair in PAIRS], [False, True]))
def test_two_techniques_together_are_exact(on_ranks: RankPool, pair: str, tied: bool) -> None:
    one, other = pair.split(" + ")
    setup = Setup(num_ranks=1, micro_batch=4, clip=0.5, levers=LEVERS[one] | LEVERS[other], num_steps=6)
    [(losses, weights, worst)] = on_ranks(1, compared, setup, tied)
    assert losses < 1e-5
    assert weights < 1e-5, worst


def test_all_compatible_techniques_together_are_exact(on_ranks: RankPool) -> None:
    together = {**LEVERS["full"], **LEVERS["offload"], **LEVERS["chunked loss"], **LEVERS["step in backward"]}
    for strategy in ("zero2", "zero3"):
        for losses, weights, worst in on_ranks(2, compared, Setup(strategy, levers=together, num_steps=6)):
            assert losses < 1e-5
            assert weights < 1e-5, worst
