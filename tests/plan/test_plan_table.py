"""The table that is printed at the start of a run."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from roomier.plan import BatchPlan, Kind, OffloadPlan, OptimizerPlan, ParallelPlan, Plan, PrecisionPlan
from roomier.plan.choices import CHOICES
from roomier.plan.table import rows


def line_of(plan: Plan, part: str) -> str:
    (line,) = [line for line in str(plan).splitlines() if line.startswith(part)]
    return " ".join(line.split())


def test_every_choice_of_the_default_plan_is_exact() -> None:
    plan = Plan()
    assert {row.part for row in rows(plan) if row.kind is None} == {"accelerator"}
    assert {row.kind for row in rows(plan) if row.kind is not None} == {Kind.EXACT}
    assert line_of(plan, "precision").startswith("precision 32-true exact")
    assert line_of(plan, "matmul").startswith("matmul highest exact")
    assert line_of(plan, "strategy").startswith("strategy single exact")
    assert line_of(plan, "clip") == "clip none exact"
    assert line_of(plan, "optimizer") == "optimizer of the module exact from configure_optimizers"
    assert str(plan).splitlines()[-1].startswith("Every choice is exact")
    assert len(str(plan).splitlines()) <= 16


def test_inexact_choices_are_labelled_and_listed_at_the_end() -> None:
    plan = Plan(precision=PrecisionPlan("bf16-true", "high"))
    assert line_of(plan, "precision").startswith("precision bf16-true approximate")
    assert line_of(plan, "matmul").startswith("matmul high near")
    last = str(plan).splitlines()[-1]
    assert last == "Not exact: precision bf16-true (approximate), matmul high (near). All other choices are exact."


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("32-true", Kind.EXACT),
        ("64-true", Kind.NEAR),
        ("bf16-mixed", Kind.NEAR),
        ("16-mixed", Kind.NEAR),
        ("bf16-true", Kind.APPROXIMATE),
    ],
)
def test_each_precision_has_its_label(mode: str, kind: Kind) -> None:
    assert CHOICES["precision.mode"][mode].kind is kind
    assert [row.kind for row in rows(Plan(precision=PrecisionPlan(mode))) if row.part == "precision"] == [kind]


def test_lines_of_batch_and_optimizer() -> None:
    plan = Plan(
        batch=BatchPlan(4, 1.0),
        optimizer=OptimizerPlan("adamw", 3e-4, 0.1, {"betas": (0.9, 0.95)}, "cosine", 100, 0.1),
    )
    choices = {row.part: row.choice for row in rows(plan)}
    assert choices["accumulate"] == "4 micro-batches"
    assert choices["clip"] == "norm at most 1.0"
    assert choices["optimizer"] == "adamw lr=0.0003 weight_decay=0.1 betas=(0.9, 0.95)"
    assert choices["schedule"] == "cosine, warm-up 100 steps, to 0.1 of lr"


def test_defaults_of_the_optimizer_class_are_listed() -> None:
    notes = {row.part: row.note for row in rows(Plan(optimizer=OptimizerPlan("sgd", lr=0.1)))}
    assert notes["optimizer"] == "torch.optim.SGD; default weight_decay"
    assert "schedule" not in notes


def test_each_tier_and_the_update_mode_have_a_line() -> None:
    offload = OffloadPlan("disk", "cpu", "disk", folder="/scratch", share=0.6, update="deferred")
    lines = [(row.part, row.choice, row.kind) for row in rows(Plan(offload=offload))]
    start = lines.index(("offload", "optimizer_states to disk, 60 %", Kind.EXACT))
    assert lines[start + 1 : start + 5] == [
        ("offload", "parameters to cpu", Kind.EXACT),
        ("offload", "activations to disk", Kind.EXACT),
        ("update", "deferred", Kind.EXACT),
        ("folder", "/scratch", None),
    ]
    modes = {("zero3", 2): "speculative (auto)", ("ddp", 2): "deferred (auto)", ("auto", 2): "auto"}
    for (strategy, devices), words in modes.items():
        chosen = Plan(
            offload=OffloadPlan(optimizer_states="disk"), parallel=ParallelPlan(strategy=strategy, devices=devices)
        )
        assert next(row for row in rows(chosen) if row.part == "update").choice == words
    assert "update" in {row.part for row in rows(Plan(offload=OffloadPlan(parameters="cpu")))}
    assert "update" not in {row.part for row in rows(Plan(offload=OffloadPlan(activations="cpu")))}


def test_facts_follow_without_a_label() -> None:
    lines = Plan().table({"model": "10.8 M parameters"}).splitlines()
    assert [line.split() for line in lines[-2:-1]] == [["model", "10.8", "M", "parameters"]]
    assert lines[-1].startswith("Every choice is exact")


@given(st.text(max_size=150), st.text(max_size=150))
@settings(max_examples=50, deadline=None)
def test_no_line_is_wider_than_100_columns(name: str, value: str) -> None:
    options = {f"option_{index}": "x" * (40 * index) for index in range(4)}
    plan = Plan(optimizer=OptimizerPlan("adamw", options=options))
    assert max(map(len, plan.table({name: value}).split("\n"))) <= 100


def test_rich_shows_the_same_cells_without_markup() -> None:
    plan = Plan(optimizer=OptimizerPlan("adamw", options={"mode": "[red]"}))
    output = io.StringIO()
    Console(file=output, width=160).print(plan)
    shown = output.getvalue()
    assert "adamw mode='[red]'" in shown
    assert all(row.part in shown and row.choice in shown for row in rows(plan))
    assert "Every choice is exact" in shown
