"""The Plan of an Accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from roomier.core.device.resolve import resolve_device
from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.engine.prepared import planner_errors
from roomier.launch import present_launch
from roomier.plan import Plan, plan_from_flags
from roomier.plan.levers import lever_that_frees_gradients, used_levers
from roomier.plan.migrate.accelerate import answers_to_keywords
from roomier.plan.migrate.answers import Answers
from roomier.plan.migrate.deepspeed.objects import answers_to_source
from roomier.plan.offload_rules import without_host_tiers
from roomier.plan.rules import refuse

_FIELDS = {
    "precision": ("precision", "mode"),
    "accumulate_grad_batches": ("batch", "accumulate_grad_batches"),
    "accelerator": ("parallel", "accelerator"),
    "compile": ("compile", "enabled"),
}
"""Mapping from each argument that completes a Plan to the section and the field of the Plan."""


def plan_of(plan: Plan | Mapping[str, Any] | str | Path | None, keywords: Mapping[str, Any]) -> Plan:
    """Return the Plan of an Accelerator. The launcher determines the number of ranks, unless ``plan`` contains this
    number.

    Args:
        plan: a Plan, a mapping, the path of a YAML or JSON file, or None.
        keywords: the keywords of Accelerate that the user passed.

    Raises:
        PlanError: a keyword is not supported or contradicts ``plan``, or the Plan is not supported in a custom loop.
    """
    keywords = dict(keywords)
    deepspeed = keywords.pop("deepspeed_plugin", None)
    answers = answers_to_keywords(keywords, os.environ, has_plan=plan is not None or deepspeed is not None)
    flags = answers.keywords()
    if deepspeed is not None:
        flags = _with_deepspeed(deepspeed, flags)
    flags.pop("hang_timeout", None)
    answers.report()
    wanted = plan_from_flags(**flags) if plan is None else _completed(Plan.of(plan), flags, answers)
    found = _on_launched_ranks(wanted)
    _check(found)
    found = without_host_tiers(found, resolve_device(found.parallel.accelerator).type)
    if found.offload.optimizer_states != "none":
        found = replace(found, offload=replace(found.offload, update="plain"))
    return found


def _with_deepspeed(plugin: Any, flags: dict[str, Any]) -> dict[str, Any]:
    launch = present_launch()
    num_ranks = 1 if launch is None else launch.world.size
    answers = answers_to_source(plugin, num_ranks, flags, "deepspeed_plugin")
    for name, value in answers.keywords().items():
        if flags.setdefault(name, value) != value:
            problem = f"differs from {value!r}, which {answers.source} requests"
            raise PlanError(name, flags[name], problem, "Remove one of the two settings")
    notice(answers.table())
    return flags


def _completed(plan: Plan, flags: Mapping[str, Any], answers: Answers) -> Plan:
    errors = []
    for name, value in flags.items():
        setting = next((each.setting for each in answers.given if each.keyword.partition(".")[0] == name), name)
        if name not in _FIELDS:
            errors.append(PlanError(setting, value, "was passed together with plan", "Remove one of the two"))
            continue
        section, field = _FIELDS[name]
        part = getattr(plan, section)
        now, default = getattr(part, field), getattr(getattr(Plan(), section), field)
        if now == default:
            plan = replace(plan, **{section: replace(part, **{field: value})})
        elif now != value:
            problem = f"requests {name}={value!r}, but the plan contains {section}.{field}={now!r}"
            errors.append(PlanError(setting, value, problem, f"Remove {setting}, or change the plan"))
    refuse(errors)
    return plan


def _on_launched_ranks(plan: Plan) -> Plan:
    launch, wanted = present_launch(), plan.parallel
    if launch is None or launch.world.size == 1 or wanted.devices * wanted.num_nodes > 1:
        return plan
    strategy = "ddp" if wanted.strategy == "single" else wanted.strategy
    world = launch.world
    return replace(
        plan, parallel=replace(wanted, strategy=strategy, devices=world.local_size, num_nodes=launch.num_nodes)
    )


def _check(plan: Plan) -> None:
    """Reject the planner, and settings that a custom loop does not support.

    Raises:
        PlanError: the plan contains such a setting.
    """
    together = "Use engine = roomier.prepare(model, optimizer, plan=plan) with engine.forward_backward"
    offload = plan.offload
    found: list[tuple[str, object, str, str]] = []
    if plan.optimizer.name is not None:
        problem = "is not supported, because the script creates the optimizer"
        found.append(("optimizer", plan.optimizer.name, problem, "Remove it from the plan"))
    if plan.adapter.lora_rank is not None:
        problem = "adds parameters that the optimizer of the script does not have"
        found.append(("lora", plan.adapter.lora_rank, problem, "Use Trainer(lora=...), or the peft package"))
    if offload.parameters != "none":
        problem = "is not supported if forward and backward are separate calls"
        action = f"{together}, or set offload={{'optimizer_states': {offload.parameters!r}}}"
        found.append(("offload.parameters", offload.parameters, problem, action))
    if offload.update not in ("auto", "plain"):
        problem = "is not supported if the script steps the optimizers"
        found.append(
            ("offload.update", offload.update, problem, "Use 'plain', or " + together[0].lower() + together[1:])
        )
    lever = lever_that_frees_gradients(plan)
    if lever is not None:
        problem = "is not supported if the script steps the optimizers"
        found.append((lever.keyword, True, problem, together))
    if plan.activation.policy == "budget":
        problem = "is not supported, because the budget is allocated by measuring a full step"
        action = "Use activation_checkpointing='full', 'every_n' or 'selective'"
        found.append(("activation.policy", "budget", problem, action))
    lazy = next((each for each in used_levers(plan) if each.changes_output_layer), None)
    if lazy is not None and plan.parallel.strategy == "ddp" and plan.parallel.find_unused_parameters:
        problem = f"is not supported with {lazy.keyword}, whose logits are not in the graph that DDP searches"
        action = f"Remove {lazy.keyword} from the plan, or {together[0].lower()}{together[1:]}"
        found.append(("find_unused_parameters", True, problem, action))
    refuse([*planner_errors(plan), *(PlanError(*each) for each in found)])
