"""Rules for offloading: settings without effect, and combinations that are not supported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from roomier.core.errors import PlanError
from roomier.plan.levers import lever_that_frees_gradients
from roomier.plan.parts import OffloadPlan

if TYPE_CHECKING:
    from roomier.plan.plan import Plan

_STATES = "offload.optimizer_states"
_PARAMETERS = "offload.parameters"


def check_offload(plan: Plan, device_type: str) -> None:
    """Reject tiers that save no memory on the device of a rank.

    If the Plan names an accelerator, the rules of the Plan perform this check. With ``accelerator="auto"``, the device
    is not known until the engine is built.

    Args:
        plan: plan to check.
        device_type: type of the device, such as ``"cpu"``.

    Raises:
        PlanError: parameters or optimizer states are offloaded to host memory, but the device is a CPU.
    """
    for error in _tiers_below(plan, device_type):
        raise error


def update_mode(plan: Plan) -> str:
    """Return the update mode of a plan that offloads optimizer states or parameters. ``"auto"`` selects a mode as
    follows.

    Speculative updates transfer the states during the entire step. However, speculative updates require twice the
    space, also write the weights, and must be repeated if gradients are clipped. Speculative updates are selected if
    they are supported and the tier is a disk, because transfers to a disk take the longest time. Otherwise, updates are
    deferred.
    """
    if plan.offload.update != "auto":
        return plan.offload.update
    clips_elements = plan.batch.gradient_clip_val is not None and not plan.batch.clips_norm
    waits = plan.parallel.strategy == "ddp" or plan.precision.mode == "16-mixed" or clips_elements
    waits = waits or plan.offload.parameters != "none"
    return "deferred" if waits or plan.offload.optimizer_states == "cpu" else "speculative"


def offloading_is_supported(plan: Plan) -> Iterator[PlanError]:
    """Apply the rules of this file if the plan offloads tensors or contains a setting for offloading."""
    if plan.offload != OffloadPlan():
        for rule in OFFLOAD_RULES:
            yield from rule(plan)


def offload_settings_have_a_tier(plan: Plan) -> Iterator[PlanError]:
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


def tiers_are_below_the_device(plan: Plan) -> Iterator[PlanError]:
    """Reject parameters and optimizer states in host memory if the plan names the CPU."""
    yield from _tiers_below(plan, plan.parallel.accelerator)


def _tiers_below(plan: Plan, device_type: str) -> Iterator[PlanError]:
    tiers = {"optimizer_states": plan.offload.optimizer_states, "parameters": plan.offload.parameters}
    in_memory = [name for name, tier in tiers.items() if tier == "cpu"]
    if device_type != "cpu" or not in_memory:
        return
    on_disk = {name: "disk" for name, tier in tiers.items() if tier != "none"}
    problem = "saves no memory on a CPU, where parameters and optimizer states are already in host memory"
    yield PlanError(f"offload.{in_memory[0]}", "cpu", problem, f"Use offload={on_disk}, or a GPU")


def parameters_are_sharded_or_single(plan: Plan) -> Iterator[PlanError]:
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


def offloaded_updates_have_their_optimizer(plan: Plan) -> Iterator[PlanError]:
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
        action = f"Set {lever.keyword}=False. offload.update='speculative' also updates in backward"
        yield PlanError(lever.field, lever.value(plan), problem, action)


def speculation_has_reduced_gradients(plan: Plan) -> Iterator[PlanError]:
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


OFFLOAD_RULES: list[Callable[[Plan], Iterator[PlanError]]] = [
    offload_settings_have_a_tier,
    tiers_are_below_the_device,
    parameters_are_sharded_or_single,
    offloaded_updates_have_their_optimizer,
    speculation_has_reduced_gradients,
]
