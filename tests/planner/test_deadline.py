"""Planning ends at its deadline and reports skipped plans. Tests count checks instead of using a clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roomier.core.errors import RoomierError
from roomier.planner.choosing.choose import choose
from roomier.planner.choosing.nearest import no_plan_fits
from roomier.planner.deadline import SEARCH_S, Deadline
from roomier.planner.hardware.this_machine import this_machine
from tests.planner.made_up_prices import (
    KIB,
    FixedPrices,
    auto,
    by_strategy,
    ends_after,
    made_up,
    regression,
    strategy_of,
)


def test_planning_ends_at_its_deadline_and_reports_skipped_plans() -> None:
    machine, deadline = this_machine(2), ends_after(2)
    choice = choose(regression(1), auto(devices=2), machine, prices=FixedPrices(by_strategy), deadline=deadline)
    assert strategy_of(choice.chosen.plan) == "ddp"
    assert not choice.is_complete
    assert not choice.as_dict()["is_complete"]
    assert "of the 6 plans compared before the time limit" in choice.why
    reasons = [each.reason for each in choice.considered if each.is_left_out]
    assert {each.partition(" (and")[0] for each in reasons} == {
        "not evaluated before the time limit. Set ROOMIER_PLANNING_S=600 to search longer than 2 s"
    }
    whole = choose(regression(1), auto(devices=2), machine, prices=FixedPrices(by_strategy), deadline=ends_after(10**6))
    assert whole.is_complete
    assert "the fastest plan that fits, of 6 plans" in whole.why


def test_if_no_time_remains_for_alternatives_the_error_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prices = made_up(monkeypatch, lambda plan, micro_batch: ((1 + (plan.precision.mode == "32-true")) * KIB, 1.0))
    choice = choose(regression(1), auto(), this_machine(), budget_bytes=KIB, prices=prices)

    def error_within(deadline: Deadline, found: Any = choice) -> str:
        return str(no_plan_fits(regression(1), auto(), found, prices=prices, deadline=deadline))

    error = error_within(ends_after(0))
    assert "The search for alternatives reached its time limit. Set ROOMIER_PLANNING_S=600 to search longer" in error
    assert "Allow more options" not in error
    error = error_within(ends_after(1000))
    assert "Allow more options with strategy={'name': 'auto', 'allow': ['bf16-mixed']}" in error
    assert "time limit" not in error
    error = error_within(ends_after(1000), replace(choice, is_complete=False))
    assert "the smallest plan evaluated before the time limit, single" in error
    assert "to search longer than 1000 s" in error


def test_other_strategies_have_half_of_the_time_if_a_concrete_strategy_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prices = made_up(monkeypatch, lambda plan, micro_batch: ((2 - (strategy_of(plan) == "zero3")) * KIB, 1.0))
    plan, machine = auto(strategy="ddp", devices=2), this_machine(2)
    choice = choose(regression(1), plan, machine, budget_bytes=KIB, prices=prices)
    late = str(no_plan_fits(regression(1), plan, choice, prices=prices, deadline=ends_after(4)))
    assert "'zero3'" not in late.partition("The search for alternatives")[0]
    assert "ROOMIER_PLANNING_S=600 to search longer than 4 s" in late
    assert "Use Trainer(strategy='zero3'" in str(
        no_plan_fits(regression(1), plan, choice, prices=prices, deadline=ends_after(1000))
    )


def test_the_user_can_set_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOMIER_PLANNING_S", "7.5")
    assert Deadline.after(SEARCH_S).limit_s == 7.5
    monkeypatch.delenv("ROOMIER_PLANNING_S")
    assert Deadline.after(SEARCH_S).limit_s == SEARCH_S
    for wrong in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("ROOMIER_PLANNING_S", wrong)
        with pytest.raises(RoomierError, match=f"ROOMIER_PLANNING_S='{wrong}': must be a positive number of seconds"):
            Deadline.after(SEARCH_S)
