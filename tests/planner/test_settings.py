"""Both methods of a forecast, the closed form and the dry run, take each setting of a Plan into account. A new field
must be added to this file: to ``CHANGES``, or with a reason to ``IRRELEVANT``."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import roomier
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.plan.parts import FIELDS
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.forecast import Forecast
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.machine import Machine
from roomier.planner.hardware.spec import machine_of
from roomier.planner.workload import Workload

BASE: dict[str, dict[str, Any]] = {
    "parallel": {"strategy": "zero3", "devices": 4, "accelerator": "cuda"},
    "optimizer": {"name": "adamw"},
}
SAMPLES = 512  # activations of at least 1 MiB are offloaded
ONE = {"parallel": {"strategy": "single", "devices": 1}}
POWERSGD = {"parallel": {"strategy": "ddp", "gradient_compression": "powersgd"}}
LORA = {"adapter": {"lora_rank": 4}}
STATES = {**ONE, "offload": {"optimizer_states": "disk"}}

# field -> new value, and other settings of both plans
CHANGES: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "parallel.strategy": ("zero2", {}),
    "parallel.devices": (2, {}),
    "parallel.num_nodes": (2, {}),
    "parallel.shard_size": (2, {"parallel": {"strategy": "hsdp"}}),
    "parallel.reduce_dtype": ("bf16", {}),
    "parallel.gradient_compression": ("powersgd", {"parallel": {"strategy": "ddp"}}),
    "parallel.compression_rank": (1, POWERSGD),
    "parallel.context_parallel_size": (2, {"batch": {"seeding": "events"}}),
    "parallel.communication": ("sequential", {}),
    "parallel.find_unused_parameters": (True, {}),
    "precision.mode": ("bf16-mixed", {}),
    "precision.matmul": ("high", {}),
    "batch.accumulate_grad_batches": (2, {}),
    "batch.gradient_clip_val": (1.0, {}),
    "batch.gradient_clip_algorithm": ("value", {"batch": {"gradient_clip_val": 1.0}}),
    "optimizer.name": ("sgd", {}),
    "optimizer.options": ({"momentum": 0.9}, {"optimizer": {"name": "sgd"}}),
    "optimizer.weight_rounding": ("nearest", {"precision": {"mode": "bf16-true"}}),
    "optimizer.step_in_backward": ("exact", ONE),
    "activation.policy": ("full", {}),
    "activation.every_n": (3, {"activation": {"policy": "every_n"}}),
    "activation.budget_bytes": (150 * 2**20, {**ONE, "activation": {"policy": "budget", "budget_bytes": 250 * 2**20}}),
    "activation.budget_fraction": (0.2, {**ONE, "activation": {"policy": "budget", "budget_fraction": 0.8}}),
    "offload.optimizer_states": ("cpu", {}),
    "offload.parameters": ("cpu", {}),
    "offload.activations": ("cpu", {}),
    "offload.share": (0.5, STATES),
    "offload.update": ("deferred", STATES),
    "offload.buffers": (1, STATES),
    "loss.chunked": (True, {}),
    "loss.chunk_tokens": (2048, {"loss": {"chunked": True}}),
    "attention.kernel": ("math", {}),
    "adapter.lora_rank": (4, {}),
    "adapter.lora_dropout": (0.1, LORA),
    "adapter.lora_targets": ("up", LORA),
    "adapter.lora_trained": ("head", LORA),
    "adapter.frozen_base": ("int8", {**ONE, **LORA}),
}
_NO_SHAPE = "changes values, but neither shapes nor operations"
_SCHEDULE = "the schedule computes one number per step"
_COMPILED = "compiled blocks have the forecast of eager blocks (docs/design/planner.md)"
IRRELEVANT = {
    "parallel.accelerator": "the machine states the device",
    "parallel.compression_warmup_steps": "a forecast describes a step after the warm-up",
    "parallel.pipeline_parallel_size": "only a dry run forecasts stages; see tests/pipeline/test_forecast.py",
    "parallel.schedule": "only a dry run forecasts stages; see tests/pipeline/test_forecast.py",
    "parallel.stages_per_rank": "only a dry run forecasts stages; see tests/pipeline/test_forecast.py",
    "parallel.split": "only a dry run forecasts stages; see tests/pipeline/test_forecast.py",
    "batch.seeding": _NO_SHAPE,
    "optimizer.lr": _NO_SHAPE,
    "optimizer.weight_decay": _NO_SHAPE,
    "optimizer.schedule": _SCHEDULE,
    "optimizer.warmup_steps": _SCHEDULE,
    "optimizer.min_lr_ratio": _SCHEDULE,
    "optimizer.log_warmup": _SCHEDULE,
    "optimizer.decay_steps": _SCHEDULE,
    "offload.folder": "the machine states the free space and the rates of the disk",
    "adapter.lora_alpha": _NO_SHAPE,
    "compile.enabled": _COMPILED,
    "compile.backend": _COMPILED,
    "compile.mode": _COMPILED,
    "choice.memory_budget_bytes": "limits the search, not a plan",
    "choice.allowed": "limits the search, not a plan",
}
"""Fields that do not affect a forecast, with the reason."""
GAPS = {
    (
        "parallel.find_unused_parameters",
        "closed form",
    ): "transfers are priced as overlapped; a dry run confirms the plan",
}
"""Fields that one of the methods does not take into account."""
METHODS = [(field, "closed form") for field in CHANGES]
METHODS += [pytest.param(field, "dry run", marks=pytest.mark.more) for field in CHANGES]


class Language(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = GPT(GPTConfig(vocab_size=256, context=32, num_heads=2, num_layers=3, width=64, dropout=0.0))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.network(batch[:, :-1], batch[:, 1:])[1]
        return loss


def plan_of(*changes: dict[str, dict[str, Any]]) -> Plan:
    values = {section: dict(fields) for section, fields in BASE.items()}
    for change in changes:
        for section, fields in change.items():
            values.setdefault(section, {}).update(fields)
    return Plan.from_dict(values)


@cache
def workload() -> Workload:
    return Workload.of(Language(), torch.zeros(SAMPLES, 33, dtype=torch.int64))


def machine(devices: int, num_nodes: int) -> Machine:
    """Return a machine on which launches of kernels take no time, so the time of a small model is that of its data."""
    found = machine_of(f"h100:{devices}", num_nodes)
    return dataclasses.replace(found, device=dataclasses.replace(found.device, operation_s=0.0))


@cache
def estimator(devices: int, num_nodes: int) -> Estimator:
    return Estimator(workload(), machine(devices, num_nodes))


@cache
def forecast(method: str, plan: Plan) -> Forecast:
    devices, num_nodes = plan.parallel.devices, plan.parallel.num_nodes
    if method == "closed form":
        return estimator(devices, num_nodes).estimate(plan, SAMPLES)
    return confirm(workload(), plan, machine(devices, num_nodes))


def cost(made: Forecast) -> dict[str, Any]:
    """Return all values of a forecast except its plan and machine."""
    names = [each.name for each in dataclasses.fields(made) if each.name not in ("plan", "machine", "remark")]
    return {name: getattr(made, name) for name in names}


def test_each_field_is_either_changed_or_irrelevant() -> None:
    fields = [f"{section}.{name}" for section, names in FIELDS.items() for name in names]
    listed = [*CHANGES, *IRRELEVANT]
    missing = [name for name in fields if name not in listed]
    assert not missing, f"add {missing} to CHANGES, or to IRRELEVANT with the reason"
    assert sorted(listed) == sorted(fields)


@pytest.mark.parametrize(("field", "method"), METHODS)
def test_a_setting_changes_the_forecast(field: str, method: str) -> None:
    value, others = CHANGES[field]
    section, _, name = field.partition(".")
    before, after = plan_of(others), plan_of(others, {section: {name: value}})
    is_seen = cost(forecast(method, before)) != cost(forecast(method, after))
    assert is_seen == ((field, method) not in GAPS)


@pytest.mark.more
@pytest.mark.parametrize("field", CHANGES)
def test_both_methods_agree_about_a_setting(field: str) -> None:
    value, others = CHANGES[field]
    section, _, name = field.partition(".")
    plan = plan_of(others, {section: {name: value}})
    closed, dry = (forecast(method, plan) for method in ("closed form", "dry run"))
    assert closed.tensor_bytes == pytest.approx(dry.tensor_bytes, rel=0.05)
    assert closed.host_bytes == dry.host_bytes
    assert closed.disk_bytes == dry.disk_bytes
    assert closed.traffic == dry.traffic
