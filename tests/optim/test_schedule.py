"""Learning rate schedules equal their formulas."""

import math

import pytest
import torch
from torch import nn

from roomier import PlanError
from roomier.techniques.optim.schedule import SCHEDULES, Factor, make_schedule

NUM_STEPS, WARMUP, FLOOR = 20, 5, 0.1


def sgd(lr=2.0):
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=lr)


def rates(schedule, count):
    """Return the learning rate of each of ``count`` steps."""
    found = []
    for _ in range(count):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


def warmup(step):
    return (step + 1) / WARMUP


SHAPES = {
    "constant": lambda done: 1.0,
    "linear": lambda done: FLOOR + (1 - FLOOR) * (1 - done),
    "cosine": lambda done: FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_formula(name):
    schedule = make_schedule(name, sgd(), NUM_STEPS, warmup_steps=WARMUP, min_lr_ratio=FLOOR)
    shape = SHAPES[name]
    expected = [
        2.0 * (warmup(step) if step < WARMUP else shape((step - WARMUP) / (NUM_STEPS - WARMUP)))
        for step in range(NUM_STEPS)
    ]
    assert rates(schedule, NUM_STEPS) == pytest.approx(expected, rel=1e-12)


def test_first_and_last_rates():
    """The rate starts above zero, reaches its maximum at the end of the warm-up, and stays above the minimum."""
    factor = Factor("cosine", NUM_STEPS, WARMUP, FLOOR)
    assert factor(0) == pytest.approx(1 / WARMUP)
    assert factor(WARMUP - 1) == factor(WARMUP) == 1.0
    assert factor(NUM_STEPS) == factor(10 * NUM_STEPS) == pytest.approx(FLOOR)


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_the_first_step_has_the_full_rate(name):
    assert Factor(name, NUM_STEPS)(0) == 1.0


def test_cosine_equals_torch():
    ours = rates(make_schedule("cosine", sgd(), NUM_STEPS), NUM_STEPS)
    theirs = rates(torch.optim.lr_scheduler.CosineAnnealingLR(sgd(), NUM_STEPS), NUM_STEPS)
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_a_logarithmic_warmup_and_the_end_of_the_decay():
    """The formulas of DeepSpeed's WarmupDecayLR, whose first step is the second step here."""
    schedule = make_schedule("linear", sgd(), math.inf, warmup_steps=WARMUP, log_warmup=True, decay_steps=NUM_STEPS)
    expected = [math.log(step + 1) / math.log(WARMUP) for step in range(WARMUP)]
    expected += [(NUM_STEPS - step) / (NUM_STEPS - WARMUP) for step in range(WARMUP, NUM_STEPS)] + [0.0] * 3
    assert rates(schedule, NUM_STEPS + 3) == pytest.approx([2.0 * each for each in expected], abs=1e-12)


def test_every_group_keeps_its_rate():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.5}], lr=2.0)
    schedule = make_schedule("linear", optimizer, 4)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [1.5, 0.375]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_run_of_unknown_length_is_rejected(name):
    with pytest.raises(PlanError, match="Set max_steps"):
        make_schedule(name, sgd(), math.inf)


def test_constant_requires_no_length():
    assert rates(make_schedule("constant", sgd(), math.inf, warmup_steps=2), 4) == [1.0, 2.0, 2.0, 2.0]


def test_a_warmup_longer_than_the_run_is_rejected():
    with pytest.raises(PlanError, match=r"warmup_steps=9.*only 5 steps"):
        make_schedule("cosine", sgd(), 5, warmup_steps=9)
