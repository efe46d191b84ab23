"""``python -m benchmarks planner``: its sample of plans, and the content of its result."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from rich.console import Console

from benchmarks import planner
from benchmarks.planner import SETUPS, Case, all_cases, few_cases, run, some_cases
from benchmarks.planner_models import MODELS
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks


def choices(case: Case) -> tuple[Any, ...]:
    return (case.model, (case.strategy, case.num_ranks), case.recompute, case.precision, case.optimizer)


def test_the_quick_sample_contains_every_model_strategy_and_technique_twice() -> None:
    cases = few_cases()
    assert {each.model for each in cases} == {*MODELS, "llama_lora"}
    for index in range(5):
        counts = Counter(choices(each)[index] for each in cases)
        assert min(counts.values()) >= 2
    assert {each.strategy for each in cases} == {strategy for strategy, _ in SETUPS}


def test_any_two_legal_choices_are_combined_in_the_sample() -> None:
    every, sample = [choices(each) for each in all_cases()], [choices(each) for each in some_cases()]
    for one, other in combinations(range(5), 2):
        assert {(row[one], row[other]) for row in every} == {(row[one], row[other]) for row in sample}


def test_no_rule_rejects_a_plan_of_the_sample() -> None:
    for case in [*few_cases(), *some_cases()]:
        assert case.plan().parallel.strategy == case.strategy


def test_a_row_contains_forecast_measurement_and_error() -> None:
    (row,) = run([Case("recommender", "single", 1, "none", "32-true", "adamw")], Ranks())
    assert row["predicted_bytes"] == sum(row["predicted_by_kind"].values())
    assert row["measured_bytes"] == sum(row["measured_by_kind"].values())
    assert row["error"] == abs(row["predicted_bytes"] / row["measured_bytes"] - 1) < 0.02


def test_the_table_shows_the_worst_row_and_failures() -> None:
    row = {**Case("gpt", "zero3", 2, "none", "32-true", "adamw").as_dict(), "predicted_bytes": 99, "error": 0.01}
    result = {
        "median_error": 0.01,
        "worst_error": 0.01,
        "rows": [{**row, "measured_bytes": 100}],
        "refused": [],
        "failures": [{"failure": "broke"}],
        "machine": {"cpu": "a CPU"},
        "torch": "2",
    }
    console = Console(width=160)
    with console.capture() as captured:
        console.print(planner.table(result))
    shown = captured.get()
    assert "zero3 on 2" in shown
    assert "1.00%" in shown
    assert "1 failed" in shown


def test_an_unknown_model_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(RoomierError, match=r"gpt_tide.*gpt_tied"):
        planner.measure(argparse.Namespace(quick=True, all=False, budgets=False, models="gpt_tide"))
