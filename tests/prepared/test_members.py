"""Every member and keyword of Accelerate's Accelerator is provided, or causes an error that states the equivalent."""

from __future__ import annotations

import inspect
from typing import Any

import accelerate
import pytest

import roomier
from roomier.core.errors import RoomierError
from roomier.plan.migrate import accelerate as migrate

PUBLIC = {name for name in dir(accelerate.Accelerator) if not name.startswith("_")}
KEYWORDS = set(inspect.signature(accelerate.Accelerator).parameters)


def test_no_member_is_missing() -> None:
    provided = set(dir(roomier.Accelerator(cpu=True)))
    assert provided | migrate.MEMBERS.keys() >= PUBLIC
    assert not provided & migrate.MEMBERS.keys()
    assert migrate.MEMBERS.keys() <= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC & migrate.MEMBERS.keys()))
def test_the_error_of_a_member_states_the_equivalent(name: str) -> None:
    accelerator = roomier.Accelerator(cpu=True)
    assert not hasattr(accelerator, name)
    with pytest.raises(RoomierError, match=f"accelerator='{name}'") as caught:
        getattr(accelerator, name)
    assert migrate.MEMBERS[name].rstrip(".") in str(caught.value)


def test_a_misspelled_member() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'backward'"):
        roomier.Accelerator(cpu=True).backwards  # noqa: B018


def test_parameters_of_members_are_accepted() -> None:
    """A script that passes a keyword of Accelerate's method finds the keyword, unless the method takes any keyword."""
    missing = []
    for name in sorted(PUBLIC - migrate.MEMBERS.keys()):
        theirs, ours = getattr(accelerate.Accelerator, name), getattr(roomier.Accelerator, name, None)
        if not callable(theirs) or not callable(ours):
            continue
        own = inspect.signature(ours).parameters
        if any(each.kind is each.VAR_KEYWORD for each in own.values()):
            continue
        of_theirs = inspect.signature(theirs).parameters.values()
        named = {each.name for each in of_theirs if each.kind is each.POSITIONAL_OR_KEYWORD}
        missing += [(name, each) for each in named - own.keys()]
    assert sorted(missing) == [
        ("load_state", "load_kwargs"),
    ]


def test_no_keyword_is_missing() -> None:
    own = set(inspect.signature(roomier.Accelerator).parameters) - {"plan", "keywords"}
    assert own | migrate._CONVERTED.keys() | migrate._REJECTED.keys() | {"deepspeed_plugin"} >= KEYWORDS


CONVERTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"mixed_precision": "bf16"}, {"precision.mode": "bf16-mixed"}),
    ({"mixed_precision": "fp16"}, {"precision.mode": "16-mixed"}),
    ({"mixed_precision": "no"}, {}),
    ({"gradient_accumulation_steps": 3}, {"batch.accumulate_grad_batches": 3}),
    (
        {"gradient_accumulation_plugin": accelerate.utils.GradientAccumulationPlugin(num_steps=5)},
        {"batch.accumulate_grad_batches": 5},
    ),
    ({"dynamo_backend": "inductor"}, {"compile.enabled": True}),
    ({"dynamo_backend": "no"}, {}),
    ({"device_placement": True, "rng_types": ["generator"]}, {}),
    (
        {"kwargs_handlers": [accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)]},
        {"parallel.strategy": "ddp", "parallel.find_unused_parameters": True},
    ),
    ({"kwargs_handlers": [accelerate.utils.AutocastKwargs(), accelerate.utils.GradScalerKwargs()]}, {}),
    ({"dataloader_config": accelerate.DataLoaderConfiguration(split_batches=True)}, {}),
]


@pytest.mark.parametrize(("keywords", "fields"), CONVERTED, ids=lambda each: ",".join(each) or "none")
def test_keywords_become_a_plan(keywords: dict[str, Any], fields: dict[str, Any]) -> None:
    if fields.get("parallel.strategy") == "ddp":
        keywords = {**keywords, "plan": None}
    plan = roomier.Accelerator(cpu=True, **keywords).plan.to_dict()
    base = roomier.Accelerator(cpu=True).plan.to_dict()
    for name, value in fields.items():
        section, _, field = name.partition(".")
        assert plan[section].pop(field) == value
        del base[section][field]
    assert plan == base


def test_fsdp_plugins() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    expected = {True: "zero3", False: "zero2"}
    for reshards, strategy in expected.items():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=reshards, activation_checkpointing=True
        )
        plan = roomier.Accelerator(cpu=True, fsdp_plugin=plugin).plan
        assert plan.parallel.strategy == strategy
        assert plan.activation.policy == "full"
    offloading = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    with pytest.raises(roomier.PlanError, match=r"cpu_offload.*offload=.*'optimizer_states': 'cpu'"):
        roomier.Accelerator(cpu=True, fsdp_plugin=offloading)


class DeepSpeedPlugin:
    """Replacement with the attributes of Accelerate's class, which requires the deepspeed package."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.deepspeed_config = config


def test_offload_to_host_memory_has_no_effect_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    plan = roomier.Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config)).plan
    assert plan.offload == roomier.plan.OffloadPlan()
    assert "offload.optimizer_states='cpu': on a CPU" in capsys.readouterr().err


def test_deepspeed_plugins() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 0.5}
    plan = roomier.Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config)).plan
    assert plan.parallel.strategy == "zero3"
    assert plan.precision.mode == "bf16-mixed"
    assert plan.batch.gradient_clip_val == 0.5
    with pytest.raises(roomier.PlanError, match="differs from 'bf16-mixed', which DeepSpeedPlugin requests"):
        roomier.Accelerator(cpu=True, mixed_precision="fp16", deepspeed_plugin=DeepSpeedPlugin(config))


REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True}, "Use mixed_precision='fp16'"),
    ({"bf16": True}, "Use mixed_precision='bf16'"),
    ({"strategy": "zero3"}, r"Pass Accelerator\(plan="),
    ({"mixed_precision": "fp8"}, "mixed_precision='fp8'.*Use one of: no, fp16, bf16"),
    ({"device_placement": False}, "device_placement=False"),
    ({"dataloader_config": accelerate.DataLoaderConfiguration(even_batches=False)}, "even_batches.*gather_for_metrics"),
    ({"dynamo_backend": "eager"}, "dynamo_backend.*inductor"),
    ({"parallelism_config": object()}, "parallelism_config.*plan"),
    ({"mixed_precison": "no"}, "Did you mean 'mixed_precision'"),
    ({"plan": {"precision": {"mode": "bf16-mixed"}}, "mixed_precision": "fp16"}, "mixed_precision.*the plan contains"),
    ({"plan": {"optimizer": {"name": "adamw"}}}, "optimizer='adamw'.*Remove it from the plan"),
    ({"plan": {"adapter": {"lora_rank": 4}}}, "lora=4.*peft"),
    ({"plan": {"offload": {"parameters": "disk", "folder": "x"}}}, "offload.parameters.*forward_backward"),
    ({"plan": {"activation": {"policy": "budget", "budget_bytes": 10**9}}}, "budget.*'full'"),
    ({"log_with": "all"}, "log_with='all'"),
    ({"log_with": "aim"}, "logger='aim'"),
    ({"log_with": accelerate.utils.LoggerType.AIM}, "logger='aim'"),
]


@pytest.mark.parametrize(
    ("keywords", "message"), REJECTED, ids=lambda each: ",".join(each) if type(each) is dict else ""
)
def test_keywords_that_are_rejected(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(roomier.PlanError, match=f"(?s){message}"):
        roomier.Accelerator(cpu=True, **keywords)


def test_variables_of_accelerate_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    accelerator = roomier.Accelerator()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)
    assert accelerator.device.type == "cpu"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(roomier.PlanError, match=r"ACCELERATE_USE_FSDP.*plan=roomier\.plan\.plan_from_flags"):
        roomier.Accelerator()
