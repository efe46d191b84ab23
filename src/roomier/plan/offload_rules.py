"""Rules for offloading: settings without effect, and combinations that are not supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.plan.levers import lever_that_frees_gradients
from roomier.plan.parts import AnyPlan, OffloadPlan, PlanParts

_STATES = "offload.optimizer_states"
_PARAMETERS = "offload.parameters"


def without_host_tiers(plan: AnyPlan, device_type: str) -> AnyPlan:
    """Return ``plan`` without offloading of parameters and optimizer states to host memory if the device is a CPU.

    On a CPU, these tensors are already in host memory. A script that offloads them from a GPU can therefore be
    tried on a machine without a GPU: roomier prints a notice, and the returned Plan shows that they are not offloaded.

    Args:
        plan: requested plan.
        device_type: type of the device, such as ``"cpu"``.
    """
    names = [name for name in ("optimizer_states", "parameters") if getattr(plan.offload, name) == "cpu"]
    if device_type != "cpu" or not names:
        return plan
    fields = " and ".join(f"offload.{name}='cpu'" for name in names)
    notice(f"{fields}: on a CPU, these tensors are already in host memory, so they are not offloaded")
    changes: dict[str, Any] = dict.fromkeys(names, "none")
    if "optimizer_states" in names:
        changes["share"] = OffloadPlan.share
    if "disk" not in (plan.offload.optimizer_states, plan.offload.parameters):
        changes["update"] = OffloadPlan.update
    return replace(plan, offload=replace(plan.offload, **changes))


def update_mode(plan: PlanParts) -> str:
    """Return the update mode of a plan that offloads optimizer states or parameters. ``"auto"`` selects a mode as
    follows.

    Speculative updates transfer the states during the entire step. However, speculative updates require twice the
    space, also write the weights, and must be repeated if gradients are clipped. Speculative updates are selected if
    they are supported and the tier is a disk, because transfers to a disk take the longest time. Updates are plain if
    unused parameters are known only after backward. Otherwise, updates are deferred.
    """
    if plan.offload.update != "auto":
        return plan.offload.update
    if plan.parallel.may_skip_units:
        return "plain"
    clips_elements = plan.batch.gradient_clip_val is not None and not plan.batch.clips_norm
    waits = plan.parallel.strategy == "ddp" or plan.precision.mode == "16-mixed" or clips_elements
    waits = waits or plan.offload.parameters != "none"
    return "deferred" if waits or plan.offload.optimizer_states == "cpu" else "speculative"


def offloading_is_supported(plan: PlanParts) -> Iterator[PlanError]:
    """Apply the rules of this file if the plan offloads tensors or contains a setting for offloading."""
    if plan.offload != OffloadPlan():
        for rule in OFFLOAD_RULES:
            yield from rule(plan)


def offload_settings_have_a_tier(plan: PlanParts) -> Iterator[PlanError]:
    """Reject settings of a tier that the plan does not use."""
    offload, default = plan.offload, OffloadPlan()
    if offload.folder is not None and not offload.uses_disk:
        action = "Remove it, or set a tier to 'disk', as in offload={'optimizer_states': 'disk'}"
        yield PlanError("offload.folder", offload.folder, "has no effect without a tier on disk", action)
    elif offload.folder == "":
        yield PlanError("offload.folder", "", "must be the path of a folder", "Set a path, or None")
    action = "Remove it, or set offload.optimizer_states to 'cpu' or 'disk'"
    if offload.optimizer_states == "none" and offload.share != default.share:
        problem = "has no effect if the optimizer states are not offloaded"
        yield PlanError("offload.share", offload.share, problem, action)
    if offload.optimizer_states != "disk" and offload.buffers != default.buffers:
        problem = "has no effect if the optimizer states are not on disk"
        action = "Remove it, or set offload.optimizer_states to 'disk'"
        yield PlanError("offload.buffers", offload.buffers, problem, action)
    if offload.optimizer_states == offload.parameters == "none" and offload.update != default.update:
        problem = "has no effect if neither optimizer states nor parameters are offloaded"
        yield PlanError("offload.update", offload.update, problem, action)


def parameters_are_sharded_or_single(plan: PlanParts) -> Iterator[PlanError]:
    """Reject offloaded parameters with strategies that keep all parameters on each rank, with quantized frozen weights,
    and with compiled blocks."""
    tier, strategy = plan.offload.parameters, plan.parallel.strategy
    if tier == "none":
        return
    if strategy in ("ddp", "zero1", "zero2"):
        why = "which keeps all parameters on each rank in a step"
        problem = f"is not supported with strategy {strategy!r}, {why}"
        yield PlanError(_PARAMETERS, tier, problem, "Use strategy='zero3', which shards them too")
    if plan.adapter.frozen_base != "as_is":
        problem = "is not supported with quantized frozen weights, which replace the parameters"
        yield PlanError(_PARAMETERS, tier, problem, "Use adapter.frozen_base='as_is'")
    if plan.compile.enabled:
        problem = "is not supported with compile=True, because compiled blocks keep references to their parameters"
        action = f"Use compile=False, or offload={{'optimizer_states': {tier!r}}}"
        yield PlanError(_PARAMETERS, tier, problem, action)


def offloaded_updates_have_their_optimizer(plan: PlanParts) -> Iterator[PlanError]:
    """Reject offloading with 1-bit Adam, which updates all parameters together, and with levers that update in
    backward."""
    offload, lever = plan.offload, lever_that_frees_gradients(plan)
    field = _STATES if offload.optimizer_states != "none" else _PARAMETERS
    tier = getattr(offload, field.partition(".")[2])
    if tier == "none":
        return
    if plan.optimizer.name == "onebit_adam":
        problem = "is not supported with optimizer 'onebit_adam', which updates all parameters together"
        yield PlanError(field, tier, problem, "Use optimizer='adamw', whose states can be offloaded")
    if lever is not None:
        problem = "is not supported with offloaded optimizer states or parameters, whose updates wait for the tier"
        action = f"Set {lever.keyword}=False"
        if offload.parameters == "none" and plan.parallel.strategy != "ddp" and plan.precision.mode != "16-mixed":
            action += ", and use offload={..., 'update': 'speculative'}, which also updates in backward"
        yield PlanError(lever.field, lever.value(plan), problem, action)


def speculation_has_reduced_gradients(plan: PlanParts) -> Iterator[PlanError]:
    """Reject speculative updates if a gradient is not complete or can be infinite when a block finishes backward."""
    if plan.offload.update != "speculative":
        return
    action = "Use 'deferred', which updates each block before its next forward pass"
    if plan.offload.parameters != "none":
        problem = "is not supported with offloaded parameters, whose gradients leave the device in backward"
        yield PlanError("offload.update", "speculative", problem, action)
    if plan.parallel.strategy == "ddp":
        problem = "is not supported with strategy 'ddp', which reduces gradients in buckets that span blocks"
        yield PlanError("offload.update", "speculative", problem, action)
    if plan.precision.mode == "16-mixed":
        problem = "is not supported with precision '16-mixed', in which gradients are scaled and can be infinite"
        yield PlanError("offload.update", "speculative", problem, action)


OFFLOAD_RULES: list[Callable[[PlanParts], Iterator[PlanError]]] = [
    offload_settings_have_a_tier,
    parameters_are_sharded_or_single,
    offloaded_updates_have_their_optimizer,
    speculation_has_reduced_gradients,
]
