"""A Plan is immutable, hashable, compared by value and normalized."""

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest

from roomier.core.errors import PlanError
from roomier.plan import BatchPlan, OptimizerPlan, Options, ParallelPlan, Plan, PrecisionPlan
from roomier.plan.choices import ALIASES, CHOICES, REFUSED, canonical
from roomier.plan.parts import FIELDS


def test_the_default_is_the_plain_float32_step_on_one_device() -> None:
    plan = Plan()
    assert (plan.parallel.strategy, plan.parallel.devices) == ("single", 1)
    assert (plan.precision.mode, plan.precision.matmul) == ("32-true", "highest")
    assert plan.batch == BatchPlan(1, None, "norm")
    assert plan.optimizer.name is None
    assert (plan.activation.policy, plan.offload.parameters, plan.compile.enabled) == ("none", "none", False)


def test_equal_plans_have_equal_hashes_and_different_plans_differ() -> None:
    first = Plan(optimizer=OptimizerPlan("adamw", lr=1, options={"betas": [0.9, 0.95], "fused": True}))
    second = Plan(optimizer=OptimizerPlan("adamw", lr=1.0, options={"fused": True, "betas": (0.9, 0.95)}))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Plan(optimizer=OptimizerPlan("adamw", lr=1.0, options={"betas": (0.9, 0.99), "fused": True}))
    assert len({first, second, Plan()}) == 2


def test_a_plan_is_immutable() -> None:
    given = {"betas": [0.9, 0.95]}
    plan = Plan(optimizer=OptimizerPlan("adamw", options=given))
    given["betas"][0] = 0.5
    assert plan.optimizer.options["betas"] == (0.9, 0.95)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.precision = PrecisionPlan("bf16-mixed")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.precision.mode = "bf16-mixed"  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.optimizer.options["eps"] = 1e-6  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.optimizer.options._items = {}  # type: ignore[attr-defined]


def test_options_unpack_to_keyword_arguments_and_are_pickled() -> None:
    options = Options({"betas": [0.9, 0.95], "eps": 1e-8})
    assert dict(**options) == {"betas": (0.9, 0.95), "eps": 1e-8}
    assert pickle.loads(pickle.dumps(options)) == options
    assert repr(options) == "{'betas': (0.9, 0.95), 'eps': 1e-08}"
    plan = Plan(optimizer=OptimizerPlan("adamw", options=options))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_numpy_numbers_are_converted() -> None:
    plan = Plan(
        batch=BatchPlan(accumulate_grad_batches=np.int64(4), gradient_clip_val=np.float32(0.5)),
        optimizer=OptimizerPlan(np.str_("adamw"), lr=np.float64(3e-4), options={"eps": np.float32(0.5)}),
    )
    assert type(plan.batch.accumulate_grad_batches) is int
    assert type(plan.batch.gradient_clip_val) is float
    assert type(plan.optimizer.name) is str
    assert type(plan.optimizer.lr) is float
    assert plan.optimizer.lr == 3e-4
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_an_integer_is_converted_to_float() -> None:
    clip = Plan(batch=BatchPlan(gradient_clip_val=1)).batch.gradient_clip_val
    assert (clip, type(clip)) == (1.0, float)


@pytest.mark.parametrize(
    ("field", "spelled", "meant"),
    [
        ("precision.mode", 16, "16-mixed"),
        ("precision.mode", "16", "16-mixed"),
        ("precision.mode", np.int64(32), "32-true"),
        ("precision.mode", "64", "64-true"),
        ("precision.mode", "bf16", "bf16-mixed"),
        ("precision.mode", "BF16-Mixed", "bf16-mixed"),
        ("precision.matmul", "tf32", "high"),
        ("optimizer.name", "AdamW", "adamw"),
        ("optimizer.name", "SGD", "sgd"),
        ("parallel.strategy", "fsdp", "zero3"),
        ("parallel.strategy", "sharded", "zero2"),
        ("parallel.strategy", "deepspeed_stage_1", "zero1"),
        ("parallel.strategy", "single_device", "single"),
        ("parallel.accelerator", "CUDA", "cuda"),
        ("offload.optimizer_states", "NVMe", "disk"),
        ("offload.parameters", "host", "cpu"),
        ("offload.activations", "nvme", "disk"),
        ("precision.mode", "nonsense", "nonsense"),
        ("precision.mode", True, True),
        ("batch.accumulate_grad_batches", 16, 16),
    ],
)
def test_aliases_are_resolved(field: str, spelled: object, meant: object) -> None:
    assert canonical(field, spelled) == meant


def test_a_part_contains_the_canonical_spelling() -> None:
    assert PrecisionPlan(16) == PrecisionPlan("16-mixed")  # type: ignore[arg-type]
    assert ParallelPlan("fsdp").strategy == "zero3"


def test_replace_validates_the_plan() -> None:
    plan = dataclasses.replace(Plan(), precision=PrecisionPlan("bf16-mixed"))
    assert plan.precision.mode == "bf16-mixed"
    with pytest.raises(PlanError, match=r"precision\.mode='16-true'"):
        dataclasses.replace(plan, precision=PrecisionPlan("16-true"))


def test_the_vocabulary_is_consistent_with_the_parts() -> None:
    fields = {f"{section}.{name}" for section, names in FIELDS.items() for name in names}
    assert set(CHOICES) <= fields
    assert set(REFUSED) <= set(CHOICES)
    assert set(ALIASES) <= set(CHOICES)
    for field, words in CHOICES.items():
        refused, aliases = REFUSED.get(field, {}), ALIASES.get(field, {})
        assert not words.keys() & refused.keys(), field
        assert not aliases.keys() & (words.keys() | refused.keys()), field
        assert set(aliases.values()) <= words.keys() | refused.keys(), field
        assert all(word == word.lower() for word in [*words, *refused, *aliases]), field


def test_a_plan_does_not_load_torch() -> None:
    code = "import sys, roomier.plan as p; p.Plan(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
