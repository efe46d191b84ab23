"""Candidate plans for a request: all combinations of the options that the request leaves open.

By default, only options that do not change the results are open, and options that only change how the sum over the
batch is split (strategy and micro-batch size). Options that change the rounding within a rank are open only if the
request lists them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from roomier.api.module import Module, network_of
from roomier.core.batch_norms import BATCH_NORMS
from roomier.core.errors import PlanError, RoomierError
from roomier.plan import Plan
from roomier.plan.choices import CHOICES, averages_itself, canonical
from roomier.plan.levers import LEVERS, Lever
from roomier.plan.parts import PARTS, ChoicePlan, Part
from roomier.plan.rules import each_error
from roomier.planner.choice import Considered
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload
from roomier.techniques.loss.chunked import find_output_layer

Changes = Mapping[str, object]
"""New values of Plan fields, keyed by the name of the field."""

STAGES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp")
"""Strategies, from the simplest to the most complex."""


def candidates(
    workload: Workload, plan: Plan, machine: Machine, *, keeps_micro_batch: str = "", is_last_resort: bool = False
) -> tuple[Considered, ...]:
    """Return the plans for the settings that ``plan`` leaves open, and one rejected plan for each strategy and reason.

    Settings of ``plan`` that differ from the defaults are preserved, as is the global batch size. If ``plan`` has a
    concrete strategy, it is the only candidate.

    Args:
        workload: workload whose ``batch_size`` is the requested micro-batch size.
        plan: requested plan.
        machine: machine to plan for.
        keeps_micro_batch: reason why micro-batches cannot be split; empty if they can be split.
        is_last_resort: if True, return only plans that are usually slow: with offloaded parameters, optimizer states on
            disk, or sequential communication.
    """
    if plan.parallel.strategy != "auto":
        return () if is_last_resort else (Considered(plan, workload.batch_size),)
    is_open = is_last_resort and plan.parallel.communication == "overlapped"
    communications: list[Changes] = [{}, {"parallel.communication": "sequential"}] if is_open else [{}]
    axes = [
        _strategies(plan),
        _kept_activations(plan, workload, machine),
        _tiers(plan, workload, machine, is_last_resort=is_last_resort),
        communications,
        *(_lever_positions(lever, plan, workload) for lever in LEVERS),
        _allowed_instead(plan, "precision.mode", plan.precision.mode),
        _allowed_instead(plan, "optimizer.name", plan.optimizer.name),
        _splits(plan, workload, keeps_micro_batch),
    ]
    found: list[Considered] = []
    refused: dict[tuple[str, str], Considered] = {}
    for combined in itertools.product(*axes):
        changes = {field: value for change in combined for field, value in change.items()}
        if not _goes_with_tiers(plan, changes) or not _goes_with_communication(changes):
            continue
        if is_last_resort and not changes.keys() & {"parallel.communication", "offload.optimizer_states"}:
            continue  # only plans that are usually slow
        candidate = _candidate(plan, changes, workload)
        if candidate.reason:
            refused.setdefault((candidate.plan.parallel.strategy, candidate.reason), candidate)
        else:
            found.append(candidate)
    if is_last_resort:
        return tuple(found)
    return (*found, *refused.values(), *_never_open(plan, workload, keeps_micro_batch))


def with_sizes(plan: Plan, field: str, largest: int) -> Iterator[Plan]:
    """Yield ``plan`` with each size of groups of ranks that read the same samples, in ascending order. The global batch
    size is preserved: because there are fewer data-parallel ranks, each accumulates more micro-batches.

    Args:
        field: ``"context_parallel_size"`` or ``"pipeline_parallel_size"``.
        largest: number that the sizes divide.
    """
    for size in range(2, largest + 1):
        if largest % size == 0:
            accumulate = plan.batch.accumulate_grad_batches * size
            with suppress(PlanError):
                yield changed(
                    plan,
                    {
                        f"parallel.{field}": size,
                        "batch.seeding": "events",
                        "batch.accumulate_grad_batches": accumulate,
                    },
                )


def changed(plan: Plan, changes: Changes) -> Plan:
    """Return a copy of ``plan`` with the fields in ``changes`` replaced.

    Raises:
        PlanError: a rule rejects the new plan.
    """
    return Plan(**_parts(plan, changes))  # type: ignore[arg-type]  # each section has its own type


def refused_plan(plan: Plan, changes: Changes) -> Plan:
    """Return a rejected plan for display. It is constructed without validation and must not be run."""
    made = object.__new__(Plan)
    for section, part in _parts(plan, changes).items():
        object.__setattr__(made, section, part)
    return made


def reason_against_smaller_batches(module: Module) -> str:
    """Return the reason why smaller micro-batches would change training; empty if they would not."""
    network = network_of(module)
    if any(isinstance(each, BATCH_NORMS) and each.training for each in network.modules()):
        return "BatchNorm computes statistics of each micro-batch, so smaller micro-batches would change training"
    return ""


def _candidate(plan: Plan, changes: Mapping[str, Any], workload: Workload) -> Considered:
    num_pieces = changes.get("batch.accumulate_grad_batches", plan.batch.accumulate_grad_batches)
    micro_batch = workload.batch_size * plan.batch.accumulate_grad_batches // num_pieces
    try:
        return Considered(changed(plan, changes), micro_batch)
    except PlanError as error:
        first = each_error(error)[0]
        return Considered(refused_plan(plan, changes), micro_batch, reason=f"{first.field}: {first.problem}")


def _parts(plan: Plan, changes: Changes) -> dict[str, Part]:
    by_section: dict[str, dict[str, object]] = {}
    for field, value in changes.items():
        section, _, name = field.partition(".")
        by_section.setdefault(section, {})[name] = value
    parts = {section: replace(getattr(plan, section), **by_section.get(section, {})) for section in PARTS}
    # The allowed options have been expanded into candidates, so only the memory budget is preserved.
    if changes.get("parallel.strategy", plan.parallel.strategy) != "auto":
        parts["choice"] = ChoicePlan(plan.choice.memory_budget_bytes)
    return parts


# ---- values of each option, the value of the requested plan first ----------------------------------------------------


def _strategies(plan: Plan) -> list[Changes]:
    parallel = plan.parallel
    if parallel.num_ranks == 1:
        return [{"parallel.strategy": "single"}]
    found: list[Changes] = [{"parallel.strategy": name} for name in ("ddp", "zero1", "zero2", "zero3")]
    # A replica spans one or more full nodes, but not all nodes, because that would be equivalent to zero3.
    sizes = [parallel.devices * num for num in range(1, parallel.num_nodes) if parallel.num_nodes % num == 0]
    return found + [{"parallel.strategy": "hsdp", "parallel.shard_size": size} for size in sizes if size > 1]


def _kept_activations(plan: Plan, workload: Workload, machine: Machine) -> list[Changes]:
    if plan.activation.policy != "none" or not workload.blocks:
        return [{}]
    found: list[Changes] = [{}, {"activation.policy": "selective"}, {"activation.policy": "full"}]
    if machine.device.has_own_memory and plan.offload.activations == "none":
        found.append({"offload.activations": "cpu"})
    return found


def _tiers(plan: Plan, workload: Workload, machine: Machine, *, is_last_resort: bool) -> list[Changes]:
    """Return tiers of model states, from the fastest to the slowest.

    On a device with separate memory, offloading optimizer states to host memory can be faster than other memory
    techniques. All other tiers are used only if no other plan fits, because disks are slow and wear out.
    """
    states, parameters = "offload.optimizer_states", "offload.parameters"
    offload = plan.offload
    if offload.optimizer_states != "none" or offload.parameters != "none" or averages_itself(plan.optimizer.name):
        return [{}]
    has_host = machine.device.has_own_memory
    if not is_last_resort:
        return [{}, {states: "cpu"}] if has_host else [{}]
    places = ("cpu", "disk") if has_host else ("disk",)
    found: list[Changes] = [{}, {states: "disk"}, {states: "disk", "offload.buffers": 1}]
    if workload.blocks and not plan.compile.enabled and plan.adapter.frozen_base == "as_is":
        found += [{states: one, parameters: other} for one, other in itertools.product(places, repeat=2)]
        found += [{states: "disk", "offload.buffers": 1, parameters: other} for other in places]
    return found


def _goes_with_communication(changes: Changes) -> bool:
    """Return False if ``changes`` combine sequential communication with a strategy that does not shard parameters.
    These combinations save little memory, so they are omitted without a reason."""
    return "parallel.communication" not in changes or changes["parallel.strategy"] in ("zero3", "hsdp")


def _goes_with_tiers(plan: Plan, changes: Mapping[str, Any]) -> bool:
    """Return whether the tiers in ``changes`` can be combined with the other options in ``changes``. Unsupported
    combinations are omitted without a reason, because the request does not mention tiers."""
    if "offload.optimizer_states" not in changes:
        return True
    frees = [lever for lever in LEVERS if lever.frees_gradients]
    if any(lever.is_used(plan) or lever.field in changes for lever in frees):
        return False
    return changes["parallel.strategy"] in ("single", "zero3", "hsdp") or "offload.parameters" not in changes


def _lever_positions(lever: Lever, plan: Plan, workload: Workload) -> list[Changes]:
    is_allowed = not lever.must_be_allowed or lever.keyword in plan.choice.words
    return [{}, {lever.field: lever.on}] if is_allowed and can_add(lever, plan, workload) else [{}]


def _allowed_instead(plan: Plan, field: str, own: str | None) -> list[Changes]:
    """Return no change, and the allowed values of ``field`` that can replace ``own``."""
    words = () if own is None else _allowed(plan, field)
    return [{}, *({field: word} for word in words if word != own)]


def _allowed(plan: Plan, field: str) -> list[str]:
    words = (str(canonical(field, word)) for word in plan.choice.words)
    return list(dict.fromkeys(word for word in words if word in CHOICES[field]))


def _splits(plan: Plan, workload: Workload, keeps_micro_batch: str) -> list[Changes]:
    if keeps_micro_batch or reason_against_smaller_batches(workload.module):
        return [{}]
    given, accumulate = workload.batch_size, plan.batch.accumulate_grad_batches
    pieces = [num for num in range(1, given + 1) if given % num == 0]
    return [{"batch.accumulate_grad_batches": accumulate * num} for num in pieces]


def _never_open(plan: Plan, workload: Workload, keeps_micro_batch: str) -> Iterator[Considered]:
    """Yield one rejected candidate for each option that no strategy supports for this model or its data."""
    strategy = "single" if plan.parallel.num_ranks == 1 else "ddp"

    def refused(changes: dict[str, object], micro_batch: int, reason: str) -> Considered:
        return Considered(refused_plan(plan, {"parallel.strategy": strategy, **changes}), micro_batch, reason=reason)

    given = workload.batch_size
    if plan.activation.policy == "none" and not workload.blocks:
        reason = "the model has no blocks (repeated modules), which recomputation requires"
        yield refused({"activation.policy": "full"}, given, reason)
    why = keeps_micro_batch or reason_against_smaller_batches(workload.module)
    if why and given > 1:
        yield refused({"batch.accumulate_grad_batches": plan.batch.accumulate_grad_batches * given}, 1, why)
    names = _allowed(plan, "optimizer.name")
    if names and plan.optimizer.name is None:
        reason = "the model creates its optimizer in configure_optimizers"
        yield refused({"optimizer.name": names[0]}, given, reason)
    for lever in LEVERS:
        is_asked = lever.keyword in plan.choice.words and not lever.is_used(plan)
        if is_asked and not can_add(lever, plan, workload):
            reason = lever.conflict(plan) or f"the model has no output layer, which a {lever.words} requires"
            yield refused({lever.field: lever.on}, given, reason)


def can_add(lever: Lever, plan: Plan, workload: Workload) -> bool:
    """Return whether the memory technique ``lever`` changes ``plan`` and is supported by the model."""
    if lever.is_used(plan) or lever.conflict(plan):
        return False
    return not lever.changes_output_layer or _has_output_layer(workload)


def _has_output_layer(workload: Workload) -> bool:
    with suppress(RoomierError):
        find_output_layer(network_of(workload.module), workload.blocks)
        return True
    return False
