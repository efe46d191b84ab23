"""Forecasts if the closed form or a shallow copy fails: a slower method is used and reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.core.errors import RoomierError
from roomier.plan import Plan
from roomier.planner.choosing import pricing
from roomier.planner.choosing.choose import choose
from roomier.planner.choosing.nearest import no_plan_fits
from roomier.planner.choosing.pricing import ClosedForms
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload
from tests.planner.made_up_prices import KIB, Regression, auto, made_up, regression, strategy_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class ByNumber(roomier.Module):
    """A model that indexes its blocks, so that a copy with fewer blocks fails."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(9))

    def training_step(self, batch: Tensor) -> Tensor:
        for number in range(9):
            batch = self.blocks[number](batch)
        return batch.square().mean()


def test_a_deep_model_that_indexes_its_blocks_is_planned_with_a_notice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workload = Workload.of(ByNumber(), torch.zeros(1, 8))
    choice = choose(workload, auto(activation_checkpointing="full", step_in_backward=True), this_machine())
    assert strategy_of(choice.chosen.plan) == "single"
    printed = capsys.readouterr().err
    notice = (
        "planning traces all 9 blocks of ByNumber, which takes longer, because the step of a copy with fewer blocks"
    )
    assert printed.count(notice) == 1
    assert "IndexError" in printed


def test_plans_without_a_closed_form_are_compared_by_dry_runs_with_one_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = ClosedForms(regression(1), this_machine())
    plan = auto(strategy="single")
    closed = prices.estimate(plan, 1)

    def fail(*args: Any) -> Forecast:
        raise KeyError("no way through")

    monkeypatch.setattr(pricing.Estimator, "estimate", fail)
    assert [prices.estimate(plan, 1).method, prices.estimate(plan, 1).method] == ["dry run", "dry run"]
    assert closed.method == "closed form"
    printed = capsys.readouterr().err
    notice = "plans for Regression are compared by dry runs, which takes longer, because the memory formula failed"
    assert printed.count(notice) == 1


def test_a_step_that_fails_in_a_dry_run_is_tried_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Regression):
        def training_step(self, batch: Tensor) -> Tensor:
            return self.network(batch).sum() * float(batch.numpy().sum())

    tried: list[Plan] = []
    estimate = pricing.DryRuns.estimate

    def counting(self: Any, plan: Plan, micro_batch: int) -> Forecast:
        tried.append(plan)
        return estimate(self, plan, micro_batch)

    monkeypatch.setattr(pricing.DryRuns, "estimate", counting)
    with pytest.raises(RoomierError, match="reads the memory of a tensor"):
        choose(Workload.of(Reads(), torch.zeros(2, 64)), auto(), this_machine())
    assert len(tried) == 1


def test_failures_during_the_search_for_alternatives_are_notes_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(plan: Plan, micro_batch: int) -> tuple[int, float]:
        if plan.precision.mode == "bf16-mixed":
            raise KeyError("a bug")
        return 2 * KIB, 1.0

    prices = made_up(monkeypatch, price)
    choice = choose(regression(1), auto(), this_machine(), budget_bytes=KIB, prices=prices)
    error = no_plan_fits(regression(1), auto(), choice, prices=prices)
    assert error.__notes__ == ["roomier could not evaluate all alternatives: raises KeyError: 'a bug'"]
