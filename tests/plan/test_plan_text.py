"""Conversion to YAML, JSON and files is lossless. Two Plans are compared field by field."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roomier.core.errors import PlanError
from roomier.plan import BatchPlan, Difference, OffloadPlan, OptimizerPlan, ParallelPlan, Plan, PrecisionPlan
from roomier.plan.choices import CHOICES

positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalar |= st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["1e-4", "1.e5", "+.5e+3", "0x1f", "1_000", "12:30", "yes", "null", "2024-01-01", "<<", "=", "~", "- a", "a: b"]
)
option = scalar | st.lists(scalar, max_size=3).map(tuple)
option_name = st.sampled_from(["betas", "eps", "momentum", "fused", "on", "1e3"])


def words(field: str) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(CHOICES[field]))


@st.composite
def optimizers(draw: st.DrawFn) -> OptimizerPlan:
    if draw(st.booleans()):
        return OptimizerPlan()
    schedule = draw(st.none() | words("optimizer.schedule"))
    return OptimizerPlan(
        name=draw(words("optimizer.name")),
        lr=draw(st.none() | positive),
        weight_decay=draw(st.none() | positive),
        options=draw(st.dictionaries(option_name, option, max_size=4)),
        schedule=schedule,
        warmup_steps=draw(st.integers(0, 10**6)) if schedule else 0,
        min_lr_ratio=draw(st.floats(0, 1)) if schedule in ("linear", "cosine") else 0.0,
    )


@st.composite
def offloads(draw: st.DrawFn) -> OffloadPlan:
    tier = draw(words("offload.optimizer_states"))
    activations = draw(words("offload.activations"))
    if tier == "none":
        return OffloadPlan(activations=activations)
    folder = draw(st.none() | st.text(min_size=1)) if "disk" in (tier, activations) else None
    mode = draw(words("offload.update").filter(lambda word: word != "speculative"))
    return OffloadPlan(tier, "none", activations, folder, draw(st.floats(0, 1)), mode)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    optimizer = draw(optimizers())
    is_onebit = optimizer.name == "onebit_adam"  # incompatible with more options than the other optimizers are
    bound = None if is_onebit else draw(st.none() | positive)
    algorithm = draw(words("batch.gradient_clip_algorithm")) if bound is not None else "norm"
    mode = draw(words("precision.mode").filter(lambda word: not is_onebit or word != "16-mixed"))
    if mode == "bf16-true" and optimizer.name is not None:
        optimizer = replace(optimizer, weight_rounding="nearest")
    if mode == "64-true" and optimizer.name in ("adamw8bit", "adamw4bit"):
        optimizer = replace(optimizer, name="adamw")
    return Plan(
        parallel=ParallelPlan("ddp" if is_onebit else "single"),
        precision=PrecisionPlan(mode, draw(words("precision.matmul"))),
        batch=BatchPlan(draw(st.integers(1, 10**6)), bound, algorithm),
        optimizer=optimizer,
        offload=OffloadPlan() if is_onebit else draw(offloads()),
    )


@given(plans())
@settings(max_examples=50, deadline=None)
def test_round_trips_are_exact(plan: Plan) -> None:
    for back in (
        Plan.from_yaml(plan.to_yaml()),
        Plan.from_json(plan.to_json()),
        Plan.from_dict(plan.to_dict()),
    ):
        assert back == plan
        assert hash(back) == hash(plan)
        assert repr(back) == repr(plan)  # the types are preserved too: 1 == 1.0 == True
        assert plan.diff(back) == []


@given(plans(), plans())
@settings(max_examples=50, deadline=None)
def test_diff_is_empty_only_for_equal_plans_and_is_symmetric(left: Plan, right: Plan) -> None:
    forth, back = left.diff(right), right.diff(left)
    assert (forth == []) == (left == right)
    turned = {(found.field, found.after, found.before) for found in map(_frozen, back)}
    assert {(found.field, found.before, found.after) for found in map(_frozen, forth)} == turned


def _frozen(found: Difference) -> Difference:
    return Difference(found.field, repr(found.before), repr(found.after))


@pytest.mark.parametrize(
    "text", ["\x85", "a\x85b", " \u2028", "\u2029\n", "\r", "\r\n", "\x0b", "\x1c", "\ufeff", "\n ", "\t"]
)
def test_unusual_line_breaks_are_preserved_in_yaml(text: str) -> None:
    plan = Plan(optimizer=OptimizerPlan("adamw", options={"betas": text}))
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_yaml_accepts_common_notations() -> None:
    plan = Plan.from_yaml(
        "precision: {mode: bf16}\noptimizer:\n  name: AdamW\n  lr: 3e-4\n  options: {betas: [0.9, .95]}\n"
    )
    assert plan.precision.mode == "bf16-mixed"
    assert plan.optimizer == OptimizerPlan("adamw", lr=0.0003, options={"betas": (0.9, 0.95)})


def test_yaml_contains_every_field_in_the_order_of_the_plan() -> None:
    lines = Plan().to_yaml().splitlines()
    assert [line.rstrip(":") for line in lines if not line.startswith(" ")] == list(Plan().to_dict())
    assert "  mode: 32-true" in lines
    assert "  gradient_clip_val: null" in lines


def test_to_dict_equals_the_json() -> None:
    plan = Plan(optimizer=OptimizerPlan("adamw", options={"betas": (0.9, 0.95)}))
    assert json.loads(plan.to_json()) == plan.to_dict()
    assert plan.to_dict()["optimizer"]["options"] == {"betas": [0.9, 0.95]}


def test_of_accepts_a_plan_values_and_files(tmp_path: Path) -> None:
    plan = Plan(precision=PrecisionPlan("bf16-mixed"))
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert Plan.of(plan) is plan
    assert Plan.of({"precision": {"mode": "bf16"}}) == plan
    assert Plan.of(tmp_path / "plan.yaml") == plan
    assert Plan.of(str(tmp_path / "plan.json")) == plan


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("plan.yaml", b"precision: {mode: 32-true", "is not valid YAML"),
        ("plan.yaml", b"precision: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("plan.yaml", b"a: 2024-13-45", "is not valid YAML"),
        ("plan.yaml", b"\xff\xfe\xff", "cannot be read"),
        ("plan.yaml", b"", "must be a mapping"),
        ("plan.yaml", b"precision: {mode: 32-true}\nprecision: {}", "'precision': is a duplicate key"),
        ("plan.yaml", b"precision: {mode: 32-true, mode: 64-true}", "'mode': is a duplicate key"),
        ("plan.json", b'{"precision": {"mode": "32-true"', "is not valid JSON"),
        ("plan.json", b'{"precision": {}, "precision": {}}', "'precision': is a duplicate key"),
    ],
)
def test_a_damaged_file_is_rejected(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.of(tmp_path / name)
    assert problem in str(caught.value)
    assert ("is not valid" not in problem) or caught.value.received == str(tmp_path / name)


@pytest.mark.parametrize("path", ["nowhere/plan.yaml", ".", "\0"])
def test_a_missing_file_is_rejected_with_its_path(path: str) -> None:
    with pytest.raises(PlanError, match=r"cannot be read: .*Pass the path of a YAML or JSON file") as caught:
        Plan.of(path)
    assert caught.value.received == path


def test_diff_lists_each_field_one_time_in_the_order_of_the_plan() -> None:
    before = Plan(optimizer=OptimizerPlan("adamw", options={"betas": [0.9, 0.95]}))
    after = Plan(
        precision=PrecisionPlan("bf16-mixed"),
        batch=BatchPlan(4, 1.0),
        optimizer=OptimizerPlan("adamw", options={"eps": 1e-6}),
    )
    assert [str(found) for found in before.diff(after)] == [
        "precision.mode: '32-true' -> 'bf16-mixed'",
        "batch.accumulate_grad_batches: 1 -> 4",
        "batch.gradient_clip_val: None -> 1.0",
        "optimizer.options.betas: [0.9, 0.95] -> (unset)",
        "optimizer.options.eps: (unset) -> 1e-06",
    ]
    assert before.diff(after)[0] == Difference("precision.mode", "32-true", "bf16-mixed")


def test_diff_rejects_other_types() -> None:
    with pytest.raises(PlanError, match=r"^other=\{\}: must be a Plan\. Convert it with Plan\.of\.$"):
        Plan().diff({})  # type: ignore[arg-type]
