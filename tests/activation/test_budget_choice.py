"""For small problems, the choice for a budget is compared with all possible choices."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from roomier.techniques.activation.budget_choice import SavingOption, Stage, choose, least_peak_bytes, peak_bytes
from tests.covering import few


def random_stages(draw: random.Random, num_stages: int, num_options: int) -> list[Stage]:
    stages = []
    for _ in range(num_stages):
        least = SavingOption(0, draw.randrange(100, 160), draw.randrange(20, 40))
        others = [
            SavingOption(draw.randrange(-5, 40), draw.randrange(90, 160), draw.randrange(0, 30))
            for _ in range(num_options - 1)
        ]
        stages.append(Stage((least, *others), draw.randrange(80, 200)))
    return stages


def lost_ns(stages: list[Stage], choice: list[int]) -> int:
    return sum(stage.options[index].lost_ns for stage, index in zip(stages, choice, strict=True))


@pytest.mark.parametrize("seed", few(range(60), 10))
def test_no_other_choice_loses_less_time(seed: int) -> None:
    draw = random.Random(seed)
    stages = random_stages(draw, draw.randrange(1, 7), draw.randrange(1, 5))
    every = [list(each) for each in itertools.product(*(range(len(stage.options)) for stage in stages))]
    least = min(peak_bytes(stages, each) for each in every)
    most = max(peak_bytes(stages, each) for each in every)
    assert least_peak_bytes(stages) == least
    assert choose(stages, least - 1) is None
    for budget in {least, most, *(draw.randrange(least, most + 1) for _ in range(10))}:
        choice = choose(stages, budget)
        assert choice is not None
        assert peak_bytes(stages, choice) <= budget
        assert lost_ns(stages, choice) == min(
            lost_ns(stages, each) for each in every if peak_bytes(stages, each) <= budget
        )


def test_later_blocks_are_preferred_among_equal_blocks() -> None:
    options = (SavingOption(0, 100, 10), SavingOption(10, 100, 0))
    stages = [Stage(options, 100)] * 6
    assert choose(stages, 100) == [0, 0, 0, 0, 0, 0]
    assert choose(stages, 130) == [0, 0, 0, 1, 1, 1]
    assert choose(stages, 160) == [1, 1, 1, 1, 1, 1]


def test_a_peak_inside_a_block_includes_only_previous_blocks() -> None:
    options = (SavingOption(0, 100, 10), SavingOption(10, 100, 0))
    stages = [Stage(options, 50)] * 6
    # The last block can save all activations, because all of them exist during its backward in any case.
    assert choose(stages, 100) == [0, 0, 0, 0, 0, 1]
    assert choose(stages, 120) == [0, 0, 0, 1, 1, 1]


def test_a_problem_without_blocks() -> None:
    assert choose([], 0) == []


@pytest.mark.parametrize("are_equal", [True, False])
def test_the_choice_for_a_hundred_blocks_is_fast(are_equal: bool) -> None:
    draw = random.Random(0)
    gib = 2**30
    stages = []
    for _ in range(100):
        kept, products, block_ns = (3 * gib, gib, 50_000_000) if are_equal else (
            draw.randrange(2 * gib, 4 * gib), draw.randrange(gib // 2, gib), draw.randrange(10**7, 10**8)
        )  # fmt: skip
        options = (
            SavingOption(0, 10 * gib, block_ns),
            SavingOption(products, 10 * gib, block_ns // 3),
            SavingOption(kept, 10 * gib, 0),
        )
        stages.append(Stage(options, 12 * gib))
    start_s = time.process_time()
    choice = choose(stages, 150 * gib)
    elapsed_s = time.process_time() - start_s
    assert choice is not None
    assert peak_bytes(stages, choice) <= 150 * gib
    assert elapsed_s < 0.5  # about 0.05 s on an idle core
