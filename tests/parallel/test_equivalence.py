"""Tests that a global batch gives the losses and weights of a plain loop in one process, on any number of ranks.

The relative tolerances after 20 steps, which the fast tests with 8 steps also use, are:

- ``64-true``: 1e-10, which is about ten thousand roundings. An error in the weights of the ranks exceeds this
  tolerance.
- ``32-true``: 1e-5. Two plain loops, one of which accumulates micro-batches, differ by up to 2e-6.
- ``bf16-mixed``: a plain loop over micro-batches rounds as the ranks do, so most runs are within 1e-6 of it. A sum in a
  different order sometimes rounds to an adjacent bf16 number, up to 2 ** -8 away, and later steps amplify the
  difference. The same applies to two plain loops, one over micro-batches and one over full batches. The distance of a
  run from either loop may be twice the distance between the loops, plus 2 ** -8. The tolerance of a first step, in
  which no earlier difference is amplified, is 1e-5.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.covering import covering, few
from tests.parallel.parity import Distance, Setup, Trained, distance, train_bare, train_on_ranks
from tests.parallel.tasks import Language, SummedLanguage, TiedLanguage, WideLanguage
from tests.ranks.pool import RankPool

TOLERANCES = {"64-true": 1e-10, "32-true": 1e-5}
FIRST_STEP_IN_BF16 = 1e-5

# A layout consists of the strategy, the number of ranks, and the number of ranks per replica. A single rank uses the
# same engine code.
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
    # Every run uses the same examples. Slow examples do not fail, because the suite measures its total time.
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.more
@each_example(6)
@given(task=TASKS, setup=SETUPS)
def test_any_layout_matches_one_process(on_ranks: RankPool, task: type[Language], setup: Setup) -> None:
    check(on_ranks, task, setup)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_example(150)
@given(task=TASKS, setup=SETUPS)
def test_any_layout_matches_one_process_many_examples(on_ranks: RankPool, task: type[Language], setup: Setup) -> None:
    check(on_ranks, task, replace(setup, num_steps=20))


# One layout per strategy, regardless of the examples above.
COVERING = [
    ("single", 1, None),
    ("ddp", 2, None),
    ("zero1", 2, None),
    ("zero2", 2, None),
    ("zero3", 2, None),
    LAYOUTS[-1],
]


@pytest.mark.parametrize(("layout", "precision"), few(covering(COVERING, ["32-true", "bf16-mixed"]), 5))
def test_each_strategy_matches_one_process(
    on_ranks: RankPool, layout: tuple[str, int, int | None], precision: str
) -> None:
    strategy, num_ranks, shard_size = layout
    setup = Setup(strategy, num_ranks, shard_size, accumulate=2, precision=precision, clip=0.5, terms="none on one")
    check(on_ranks, Language, setup)


def train_wide(setup: Setup, has_norms_in_root: bool) -> Trained:
    if has_norms_in_root:
        return train_on_ranks(WideLanguage, setup)
    with patch("roomier.techniques.parallel.shard.root_parameters_of", return_value=set()):
        return train_on_ranks(WideLanguage, setup)


@pytest.mark.more
@pytest.mark.parametrize(
    "setup",
    [
        Setup("zero2", 2, accumulate=2, precision="bf16-mixed", num_steps=3),
        Setup("zero3", 2, accumulate=2, precision="bf16-mixed", num_steps=3),
        Setup("zero3", 2, clip=0.5, levers={"step_in_backward": True}, precision="bf16-mixed", num_steps=3),
        pytest.param(
            Setup("hsdp", 4, 2, accumulate=2, precision="bf16-mixed", num_steps=3),
            marks=pytest.mark.slow,
            id="hsdp",
        ),
    ],
    ids=["zero2", "zero3", "zero3 with steps in backward", None],
)
def test_norms_in_the_root_unit_train_bit_identically(on_ranks: RankPool, setup: Setup) -> None:
    [joined, *_], [separate, *_] = on_ranks.each(setup.num_ranks, train_wide, [(setup, True), (setup, False)])
    assert joined.losses == separate.losses
    assert distance(joined, separate).weights == 0.0


@pytest.mark.parametrize("strategy", few(["zero1", "zero2", "zero3", "hsdp"]))
def test_sequential_communication_trains_bit_identically(on_ranks: RankPool, strategy: str) -> None:
    num_ranks, shard_size = (4, 2) if strategy == "hsdp" else (2, None)
    plain = Setup(strategy, num_ranks, shard_size, accumulate=2, clip=0.5, num_steps=3)
    setups = [
        replace(plain, precision=precision, options=options, levers=levers)
        for precision, levers in (("32-true", {}), ("bf16-mixed", {"activation_checkpointing": "full"}))
        for options in ({}, {"communication": "sequential"})
    ]
    results = on_ranks.each(num_ranks, train_on_ranks, [(Language, each) for each in setups])
    for overlapped, sequential in (results[:2], results[2:]):
        assert sequential[0].losses == overlapped[0].losses
        assert sequential[0].norms == overlapped[0].norms
        assert distance(sequential[0], overlapped[0]).weights == 0.0


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_clipping_by_value(on_ranks: RankPool, strategy: str) -> None:
    check(on_ranks, Language, Setup(strategy, 2, accumulate=2, clip=0.01, clip_algorithm="value"))


def check(on_ranks: RankPool, task: type[Language], setup: Setup) -> None:
    short = replace(setup, num_steps=1)
    setups = [setup, short] if setup.precision == "bf16-mixed" else [setup]
    trained, *first = on_ranks.each(setup.num_ranks, train_on_ranks, [(task, each) for each in setups])
    for other in trained[1:]:
        assert other.losses == trained[0].losses
        assert other.norms == trained[0].norms
        assert distance(other, trained[0]).weights == 0.0
    whole = train_bare(task, setup)
    if setup.precision == "bf16-mixed":
        check_bf16(task, setup, trained[0], whole)
        apart = distance(first[0][0], train_bare(task, short, in_parts=True))
        assert largest(apart) < FIRST_STEP_IN_BF16, apart
    else:
        apart = distance(trained[0], whole)
        assert largest(apart) < TOLERANCES[setup.precision], apart


def check_bf16(task: type[Language], setup: Setup, trained: Trained, whole: Trained) -> None:
    in_parts = train_bare(task, setup, in_parts=True)
    allowed = distance(in_parts, whole)
    for reference in (in_parts, whole):
        apart = distance(trained, reference)
        assert apart.losses <= 2 * allowed.losses + 2**-8, (apart, allowed)
        assert apart.norms <= 2 * allowed.norms + 2**-8, (apart, allowed)
        assert apart.weights <= 2 * allowed.weights + 2**-8, (apart, allowed)
    assert max(allowed.losses, allowed.weights) < 0.1  # otherwise the bounds above would be too loose


def largest(apart: Distance) -> float:
    return max(apart.losses, apart.norms, apart.weights)
