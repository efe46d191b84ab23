"""All plans for a request: each option that the request leaves open, in each of its values.

Options that are open by default are exact, or change only how the sum over the batch is split (strategy, micro-batch).
Options that round differently within a rank are open if the request allows them by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from roomier.api.module import Module
from roomier.api.wrapped import network_of
from roomier.core.batch_norms import BATCH_NORMS
from roomier.core.errors import PlanError, RoomierError
from roomier.hardware.machine import Machine
from roomier.loss.output_layer import find_output_layer
from roomier.plan import Plan
from roomier.plan.choices import CHOICES, canonical
from roomier.plan.parts import CHUNKED_LOSS, PARTS, ChoicePlan, Part
from roomier.plan.rules import each_error
from roomier.planner.workload import Workload

Changes = Mapping[str, object]
"""Field of a Plan -> value."""

STAGES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp")
"""From the simplest on."""


@dataclass(frozen=True)
class Candidate:
    """A plan to look at.

    Attributes:
        plan: with one strategy. Where a rule refuses it, it is there to be shown, never to be run.
        micro_batch: samples on each rank.
        refusal: why it cannot run; empty where it can.
    """

    plan: Plan
    micro_batch: int
    refusal: str = ""


def candidates(
    workload: Workload, plan: Plan, machine: Machine, *, keeps_micro_batch: str = ""
) -> tuple[Candidate, ...]:
    """The plans for what ``plan`` asks; of those that a rule refuses, one for each strategy and rule.

    What ``plan`` says in other than its defaults stays as it is: with a strategy by name, the plan itself is the only
    one. The global batch stays as it is, always.

    Args:
        workload: its ``batch_size`` is the micro-batch that was given.
        keeps_micro_batch: why micro-batches cannot be made smaller; empty where they can.
    """
    if plan.parallel.strategy != "auto":
        return (Candidate(plan, workload.batch_size),)
    axes = [
        _strategies(plan),
        _kept_activations(plan, workload, machine),
        _losses(plan, workload),
        _updates(plan),
        _precisions(plan),
        _optimizers(plan),
        _cuts(plan, workload, keeps_micro_batch),
    ]
    found: list[Candidate] = []
    refused: dict[tuple[str, str], Candidate] = {}
    for combined in itertools.product(*axes):
        changes = {field: value for change in combined for field, value in change.items()}
        candidate = _candidate(plan, changes, workload)
        if candidate.refusal:
            refused.setdefault((candidate.plan.parallel.strategy, candidate.refusal), candidate)
        else:
            found.append(candidate)
    return (*found, *refused.values(), *_never_open(plan, workload, keeps_micro_batch))


def changed(plan: Plan, changes: Changes) -> Plan:
    """``plan`` with other values in some fields.

    Raises:
        PlanError: a rule refuses it.
    """
    return Plan(**_parts(plan, changes))  # type: ignore[arg-type]  # each section holds its own part


def refused_plan(plan: Plan, changes: Changes) -> Plan:
    """What a rule refuses, as a value to be shown: made past the check, and never run."""
    made = object.__new__(Plan)
    for section, part in _parts(plan, changes).items():
        object.__setattr__(made, section, part)
    return made


def keeps_batches_whole(module: Module) -> str:
    """Why smaller micro-batches would change what is learned; empty where they do not."""
    network = network_of(module)
    if any(isinstance(each, BATCH_NORMS) and each.training for each in network.modules()):
        return "BatchNorm takes the statistics of each micro-batch, so that smaller ones would train another model"
    return ""


def _candidate(plan: Plan, changes: Mapping[str, Any], workload: Workload) -> Candidate:
    num_pieces = changes.get("batch.accumulate_grad_batches", plan.batch.accumulate_grad_batches)
    micro_batch = workload.batch_size * plan.batch.accumulate_grad_batches // num_pieces
    try:
        return Candidate(changed(plan, changes), micro_batch)
    except PlanError as error:
        first = each_error(error)[0]
        return Candidate(refused_plan(plan, changes), micro_batch, f"{first.field}: {first.problem}")


def _parts(plan: Plan, changes: Changes) -> dict[str, Part]:
    by_section: dict[str, dict[str, object]] = {}
    for field, value in changes.items():
        section, _, name = field.partition(".")
        by_section.setdefault(section, {})[name] = value
    parts = {section: replace(getattr(plan, section), **by_section.get(section, {})) for section in PARTS}
    # What was allowed is settled now; the budget stays as a record.
    if changes.get("parallel.strategy", plan.parallel.strategy) != "auto":
        parts["choice"] = ChoicePlan(plan.choice.memory_budget_bytes)
    return parts


# ---- one lever each: its positions, that of the wanted plan first ----------------------------------------------------


def _strategies(plan: Plan) -> list[Changes]:
    parallel = plan.parallel
    if parallel.num_ranks == 1:
        return [{"parallel.strategy": "single"}]
    found: list[Changes] = [{"parallel.strategy": name} for name in ("ddp", "zero1", "zero2", "zero3")]
    # A copy within whole nodes: one node, or several, but not all of them, which is zero3.
    sizes = [parallel.devices * num for num in range(1, parallel.num_nodes) if parallel.num_nodes % num == 0]
    return found + [{"parallel.strategy": "hsdp", "parallel.shard_size": size} for size in sizes if size > 1]


def _kept_activations(plan: Plan, workload: Workload, machine: Machine) -> list[Changes]:
    if plan.activation.policy != "none" or not workload.blocks:
        return [{}]
    found: list[Changes] = [{}, {"activation.policy": "selective"}, {"activation.policy": "full"}]
    if machine.device.kind == "cuda" and plan.offload.activations == "none":
        found.append({"offload.activations": "cpu"})
    return found


def _losses(plan: Plan, workload: Workload) -> list[Changes]:
    is_open = CHUNKED_LOSS in plan.choice.words and can_chunk_loss(plan, workload)
    return [{}, {"loss.chunked": True}] if is_open else [{}]


def _updates(plan: Plan) -> list[Changes]:
    is_open = plan.optimizer.step_in_backward == "none" and plan.precision.mode != "16-mixed"
    return [{}, {"optimizer.step_in_backward": "exact"}] if is_open else [{}]


def _precisions(plan: Plan) -> list[Changes]:
    modes = [word for word in _allowed(plan, "precision.mode") if word != plan.precision.mode]
    return [{}, *({"precision.mode": mode} for mode in modes)]


def _optimizers(plan: Plan) -> list[Changes]:
    if plan.optimizer.name is None:
        return [{}]
    names = [word for word in _allowed(plan, "optimizer.name") if word != plan.optimizer.name]
    return [{}, *({"optimizer.name": name} for name in names)]


def _allowed(plan: Plan, field: str) -> list[str]:
    words = (str(canonical(field, word)) for word in plan.choice.words)
    return list(dict.fromkeys(word for word in words if word in CHOICES[field]))


def _cuts(plan: Plan, workload: Workload, keeps_micro_batch: str) -> list[Changes]:
    if keeps_micro_batch or keeps_batches_whole(workload.module):
        return [{}]
    given, accumulate = workload.batch_size, plan.batch.accumulate_grad_batches
    pieces = [num for num in range(1, given + 1) if given % num == 0]
    return [{"batch.accumulate_grad_batches": accumulate * num} for num in pieces]


def _never_open(plan: Plan, workload: Workload, keeps_micro_batch: str) -> Iterator[Candidate]:
    """Levers that this model or its data rule out whatever the strategy, each told once."""
    strategy = "single" if plan.parallel.num_ranks == 1 else "ddp"

    def refused(changes: dict[str, object], micro_batch: int, reason: str) -> Candidate:
        return Candidate(refused_plan(plan, {"parallel.strategy": strategy, **changes}), micro_batch, reason)

    given = workload.batch_size
    if plan.activation.policy == "none" and not workload.blocks:
        reason = "the model has no blocks, by which activations are computed again: nothing in it repeats"
        yield refused({"activation.policy": "full"}, given, reason)
    why = keeps_micro_batch or keeps_batches_whole(workload.module)
    if why and given > 1:
        yield refused({"batch.accumulate_grad_batches": plan.batch.accumulate_grad_batches * given}, 1, why)
    names = _allowed(plan, "optimizer.name")
    if names and plan.optimizer.name is None:
        reason = "the model makes its own optimizer in configure_optimizers"
        yield refused({"optimizer.name": names[0]}, given, reason)
    if CHUNKED_LOSS in plan.choice.words and not plan.loss.chunked and not can_chunk_loss(plan, workload):
        reason = "the model has no output layer whose logits a chunked loss could compute"
        if plan.compile.enabled:
            reason = "'auto' does not add a chunked loss to compile=True: set chunked_loss=True to use both"
        yield refused({"loss.chunked": True}, given, reason)


def can_chunk_loss(plan: Plan, workload: Workload) -> bool:
    """Return whether a chunked loss is a change of ``plan`` that the model supports."""
    return not (plan.loss.chunked or plan.compile.enabled) and _has_output_layer(workload)


def _has_output_layer(workload: Workload) -> bool:
    try:
        find_output_layer(network_of(workload.module), workload.blocks)
    except RoomierError:
        return False
    return True
