"""The same global batch gives the same losses and weights as a bare loop in one process, however it is divided.

Three tolerances, relative, after 20 steps:

- ``64-true``, 1e-10: about ten thousand roundings. What is wrong in the arithmetic of shares, and not in its last bit,
  cannot hide there.
- ``32-true``, 1e-5: two bare loops, one of which adds up micro-batches, differ by up to 2e-6.
- ``bf16-mixed``: a bare loop over micro-batches rounds as the ranks do, so most runs are within 1e-6 of it. A sum in
  another order now and then rounds to the neighbouring bf16 number, up to 2 ** -8 away, and steps carry that on. So do
  two bare loops, one over micro-batches, one over whole batches. A run may be as far from either as twice what these
  two are from each other, and once 2 ** -8. The first step has no past to carry on: 1e-5.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.covering import covering
from tests.parallel.parity import Distance, Setup, Trained, distance, train_bare, train_on_ranks
from tests.parallel.tasks import Language, SummedLanguage, TiedLanguage, WideLanguage
from tests.ranks.pool import RankPool

TOLERANCES = {"64-true": 1e-10, "32-true": 1e-5}
FIRST_STEP_IN_BF16 = 1e-5

# Strategy, ranks, ranks that share a copy. One rank has nothing to divide, and takes the same way through the engine.
LAYOUTS = [
    ("single", 1, None),
    *((strategy, num_ranks, None) for strategy in ("ddp", "zero1", "zero2", "zero3") for num_ranks in (2, 4)),
    ("hsdp", 4, 2),
]

SETUPS = st.builds(
    lambda layout, **others: Setup(strategy=layout[0], num_ranks=layout[1], shard_size=layout[2], **others),
    layout=st.sampled_from(LAYOUTS),
    accumulate=st.integers(1, 3),
    micro_batch=st.integers(1, 3),
    precision=st.sampled_from(["32-true", "bf16-mixed", "64-true"]),
    clip=st.sampled_from([None, 0.5]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    terms=st.sampled_from(["all", "some", "none on one"]),
)
TASKS = st.sampled_from([Language, TiedLanguage, SummedLanguage])


def each_example(count: int) -> settings:
    # The same examples each time; what is slow is told by the time of the whole suite.
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )


@each_example(6)
@given(task=TASKS, setup=SETUPS)
def test_any_division_trains_as_one_process(on_ranks: RankPool, task: type[Language], setup: Setup) -> None:
    check(on_ranks, task, setup)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_example(150)
@given(task=TASKS, setup=SETUPS)
def test_any_division_trains_as_one_process_at_length(on_ranks: RankPool, task: type[Language], setup: Setup) -> None:
    check(on_ranks, task, setup)


# What each strategy does differently, whatever the examples above are.
COVERING = [
    ("single", 1, None),
    ("ddp", 2, None),
    ("zero1", 2, None),
    ("zero2", 4, None),
    ("zero3", 2, None),
    LAYOUTS[-1],
]


@pytest.mark.parametrize(("layout", "precision"), covering(COVERING, ["32-true", "bf16-mixed"]))
def test_each_strategy_trains_as_one_process(
    on_ranks: RankPool, layout: tuple[str, int, int | None], precision: str
) -> None:
    strategy, num_ranks, shard_size = layout
    setup = Setup(strategy, num_ranks, shard_size, accumulate=2, precision=precision, clip=0.5, terms="none on one")
    check(on_ranks, Language, setup)


def train_wide(setup: Setup, *, has_norms_in_root: bool) -> Trained:
    if has_norms_in_root:
        return train_on_ranks(WideLanguage, setup)
    with patch("roomier.parallel.shard.root_parameters_of", return_value=set()):
        return train_on_ranks(WideLanguage, setup)


@pytest.mark.parametrize("layout", [("zero2", 2, None), ("zero3", 2, None), LAYOUTS[-1]], ids=lambda layout: layout[0])
def test_norms_in_the_root_unit_train_bit_identically(on_ranks: RankPool, layout: tuple[str, int, int | None]) -> None:
    strategy, num_ranks, shard_size = layout
    setup = Setup(strategy, num_ranks, shard_size, accumulate=2, precision="bf16-mixed", num_steps=5)
    joined = on_ranks(num_ranks, train_wide, setup, has_norms_in_root=True)[0]
    separate = on_ranks(num_ranks, train_wide, setup, has_norms_in_root=False)[0]
    assert joined.losses == separate.losses
    assert distance(joined, separate).weights == 0.0


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_clipping_by_value(on_ranks: RankPool, strategy: str) -> None:
    check(on_ranks, Language, Setup(strategy, 2, accumulate=2, clip=0.01, clip_algorithm="value"))


def check(on_ranks: RankPool, task: type[Language], setup: Setup) -> None:
    trained = on_ranks(setup.num_ranks, train_on_ranks, task, setup)
    for other in trained[1:]:
        assert other.losses == trained[0].losses
        assert other.norms == trained[0].norms
        assert distance(other, trained[0]).weights == 0.0
    whole = train_bare(task, setup)
    if setup.precision == "bf16-mixed":
        check_bf16(on_ranks, task, setup, trained[0], whole)
    else:
        apart = distance(trained[0], whole)
        assert largest(apart) < TOLERANCES[setup.precision], apart


def check_bf16(on_ranks: RankPool, task: type[Language], setup: Setup, trained: Trained, whole: Trained) -> None:
    in_parts = train_bare(task, setup, in_parts=True)
    allowed = distance(in_parts, whole)
    for reference in (in_parts, whole):
        apart = distance(trained, reference)
        assert apart.losses <= 2 * allowed.losses + 2**-8, (apart, allowed)
        assert apart.norms <= 2 * allowed.norms + 2**-8, (apart, allowed)
        assert apart.weights <= 2 * allowed.weights + 2**-8, (apart, allowed)
    assert max(allowed.losses, allowed.weights) < 0.1  # else the bound above would let anything through
    short = replace(setup, num_steps=1)
    first = on_ranks(setup.num_ranks, train_on_ranks, task, short)[0]
    apart = distance(first, train_bare(task, short, in_parts=True))
    assert largest(apart) < FIRST_STEP_IN_BF16, apart


def largest(apart: Distance) -> float:
    return max(apart.losses, apart.norms, apart.weights)
