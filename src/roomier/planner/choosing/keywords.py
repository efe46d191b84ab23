"""Conversion of a Plan to Trainer keywords that the user can copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from roomier.core.units import parse_bytes
from roomier.plan import Plan
from roomier.plan.levers import used_levers
from roomier.plan.parts import SETTINGS_OF_STRATEGY, Part
from roomier.techniques.adapters.lora import as_keyword


def trainer_keywords(plan: Plan) -> dict[str, Any]:
    """Return the Trainer keywords that produce ``plan``, without those that have default values."""
    strategy = _strategy(plan)
    found: dict[str, Any] = {} if strategy == "single" else {"strategy": strategy}
    parallel, batch, optimizer, activation = plan.parallel, plan.batch, plan.optimizer, plan.activation
    found |= _given(parallel, {"accelerator": "accelerator", "devices": "devices", "num_nodes": "num_nodes"})
    found |= _given(plan.precision, {"mode": "precision", "matmul": "matmul_precision"})
    found |= _given(batch, {name: name for name in vars(batch)})
    found |= _optimizer(plan)
    if optimizer.schedule is not None:
        settings = _given(optimizer, {name: name for name in _OF_SCHEDULE})
        found["lr_schedule"] = {"name": optimizer.schedule, **settings} if settings else optimizer.schedule
    if activation.policy != "none":
        found["activation_checkpointing"] = _recompute(plan)
    if (offload := _given(plan.offload, {name: name for name in vars(plan.offload)})) != {}:
        found["offload"] = offload
    found |= {lever.keyword: lever.as_keyword(plan) for lever in used_levers(plan)}
    found |= _given(plan.attention, {"kernel": "attention"})
    if plan.compile.enabled:
        found["compile"] = _given(plan.compile, {"backend": "backend", "mode": "mode"}) or True
    if plan.adapter.lora_rank is not None:
        found["lora"] = as_keyword(plan.adapter)
    if plan.choice.memory_budget_bytes is not None:
        found["memory_budget"] = _bytes(plan.choice.memory_budget_bytes)
    return found


def as_call(keywords: Mapping[str, Any]) -> str:
    """Return the Trainer call as text, such as ``Trainer(strategy='zero2', devices=2)``."""
    return f"Trainer({', '.join(f'{name}={value!r}' for name, value in keywords.items())})"


def _given(part: Part, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of ``part`` that differ from their defaults, as a dict of keywords and values."""
    defaults = {each.name: each.default for each in dataclasses.fields(part)}
    values = {field: getattr(part, field) for field in names}
    return {names[field]: value for field, value in values.items() if value != defaults[field]}


def _strategy(plan: Plan) -> Any:
    settings = _given(plan.parallel, {name: name for name in ("shard_size", *SETTINGS_OF_STRATEGY)})
    if plan.choice.words:
        settings["allow"] = list(plan.choice.words)
    return {"name": plan.parallel.strategy, **settings} if settings else plan.parallel.strategy


_OF_SCHEDULE = ("warmup_steps", "log_warmup", "min_lr_ratio", "decay_steps")


def _optimizer(plan: Plan) -> dict[str, Any]:
    optimizer = plan.optimizer
    if optimizer.name is None:
        return {}
    lr = {} if optimizer.lr is None else {"lr": optimizer.lr}
    settings = _given(optimizer, {"weight_decay": "weight_decay", "weight_rounding": "weight_rounding"})
    settings |= dict(optimizer.options)
    if settings:
        return {"optimizer": {"name": optimizer.name, **lr, **settings}}
    return {"optimizer": optimizer.name} | ({} if optimizer.lr is None else {"learning_rate": optimizer.lr})


def _recompute(plan: Plan) -> Any:
    activation = plan.activation
    if activation.budget_bytes is not None:
        return _bytes(activation.budget_bytes)
    if activation.budget_fraction is not None:
        return activation.budget_fraction
    if activation.every_n is not None:
        return {"policy": "every_n", "every_n": activation.every_n}
    return activation.policy


def _bytes(num_bytes: int) -> int | str:
    """Return a string such as ``"6GiB"`` if it represents the number exactly, otherwise the number of bytes."""
    for unit in ("GiB", "MiB"):
        text = f"{num_bytes / parse_bytes('', f'1{unit}'):g}{unit}"
        if parse_bytes("", text) == num_bytes:
            return text
    return num_bytes
