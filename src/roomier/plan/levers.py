"""Levers as data. A lever is a memory technique that one keyword of the Trainer enables.

The planner, the printed plan and the messages read the rows of :data:`LEVERS` and contain no code for individual
levers. The rules for levers and offloading, :data:`LEVER_RULES`, reject combinations that cannot work, that save no
memory, or that have no effect. ``CONTRIBUTING.md`` describes how to add a lever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.plan.choices import OPTIMIZERS, POLICIES, Choice, ImportedChoice, Kind, averages_itself, choice_of
from roomier.plan.parts import FIELDS, PARTS, AnyPlan, OffloadPlan, PlanParts


@dataclass(frozen=True)
class Lever:
    """A memory technique that one keyword of the Trainer enables.

    Attributes:
        keyword: argument of the Trainer. The strategy ``"auto"`` uses a lever that is not exact only if its keyword is
            allowed, as in ``{"name": "auto", "allow": [keyword]}``.
        field: field of the Plan, as ``"section.name"``. The default value of the field disables the lever.
        on: value of the field if the keyword is True.
        words: name of the lever in descriptions of a plan.
        row: text in the first column of the printed plan.
        text: function that returns the second column of the printed plan.
        number: field that is set if the value of the keyword is a number; empty if the keyword accepts no number.
        conflict: function that returns the reason why ``strategy="auto"`` does not add the lever to a plan. The reason
            is empty if the lever can be added.
        changes_output_layer: whether the lever replaces the output layer of a language model. If so, the model must
            have an output layer.
        frees_gradients: whether the backward pass uses and frees the gradients, so none exist after it.
    """

    keyword: str
    field: str
    on: Any
    words: str
    row: str
    text: Callable[[PlanParts], str]
    number: str = ""
    conflict: Callable[[PlanParts], str] = lambda plan: ""
    changes_output_layer: bool = False
    frees_gradients: bool = False

    @property
    def off(self) -> Any:
        """Value of the field that disables the lever."""
        return _default(self.field)

    @property
    def must_be_allowed(self) -> bool:
        """True if the lever is not exact, so ``strategy="auto"`` may use it only if its keyword is allowed."""
        return self.choice(self.on).kind is not Kind.EXACT

    def choice(self, value: Any) -> Choice:
        """Return the label and the remark of the choice ``value``."""
        return choice_of(self.field, value)

    def value(self, plan: PlanParts) -> Any:
        """Return the value of the field in ``plan``."""
        return read(plan, self.field)

    def is_used(self, plan: PlanParts) -> bool:
        """Return True if ``plan`` uses the lever."""
        return bool(self.value(plan) != self.off)

    def as_keyword(self, plan: PlanParts) -> Any:
        """Return the keyword's value for the settings in ``plan``. The plan must use the lever."""
        number = read(plan, self.number) if self.number else None
        if number is not None:
            return number
        value = self.value(plan)
        return True if value == self.on else value


def _chunks(plan: PlanParts) -> str:
    size = plan.loss.chunk_tokens
    return "chunks of 64 MiB of logits" if size is None else f"chunks of {size} tokens"


LEVERS = (
    Lever(
        keyword="chunked_loss",
        field="loss.chunked",
        on=True,
        words="chunked loss",
        row="loss",
        text=_chunks,
        number="loss.chunk_tokens",
        conflict=lambda plan: (
            "'auto' does not add a chunked loss to compile=True. Set chunked_loss=True to use both"
            if plan.compile.enabled
            else ""
        ),
        changes_output_layer=True,
    ),
    Lever(
        keyword="step_in_backward",
        field="optimizer.step_in_backward",
        on="exact",
        words="step in backward",
        row="update",
        text=lambda plan: f"in backward, {plan.optimizer.step_in_backward}",
        conflict=lambda plan: "16-mixed scales the loss" if plan.precision.mode == "16-mixed" else "",
        frees_gradients=True,
    ),
)
"""Levers in the order in which the printed plan lists them."""

BY_PERMISSION = tuple(lever.keyword for lever in LEVERS if lever.must_be_allowed)
"""Keywords of the levers that ``strategy="auto"`` uses only if the request allows them."""


def used_levers(plan: PlanParts) -> list[Lever]:
    """Return the levers that ``plan`` uses."""
    return [lever for lever in LEVERS if lever.is_used(plan)]


def lever_that_frees_gradients(plan: PlanParts) -> Lever | None:
    """Return the lever of ``plan`` that frees the gradients in the backward pass; None if gradients exist after the
    backward pass.
    """
    return next((lever for lever in used_levers(plan) if lever.frees_gradients), None)


def without(plan: AnyPlan, levers: Sequence[Lever] = LEVERS) -> AnyPlan:
    """Return ``plan`` with ``levers`` turned off."""
    for lever in levers:
        fields = [lever.field, lever.number] if lever.number else [lever.field]
        section = lever.field.partition(".")[0]
        defaults = {field.partition(".")[2]: _default(field) for field in fields}
        plan = replace(plan, **{section: replace(getattr(plan, section), **defaults)})
    return plan


def read(plan: PlanParts, field: str) -> Any:
    """Return the value of ``field``, such as ``"loss.chunked"``, in ``plan``."""
    section, _, name = field.partition(".")
    return getattr(getattr(plan, section), name)


def _default(field: str) -> Any:
    section, _, name = field.partition(".")
    return getattr(PARTS[section](), name)


def set_fields(plan: PlanParts, fields: str, problem: str, action: str) -> Iterator[PlanError]:
    """Yield an error for each of ``fields``, separated by spaces, whose value in ``plan`` differs from its default."""
    for field in fields.split():
        value = read(plan, field)
        if value != _default(field):
            yield PlanError(field, value, problem, action)


def rounding_in_force(plan: PlanParts) -> str | None:
    """Return the rounding of bfloat16 weights. None if the plan has no such weights, or if the module creates its
    optimizer."""
    optimizer = plan.optimizer
    if plan.precision.mode != "bf16-true" or optimizer.name is None:
        return None
    return optimizer.weight_rounding or "split"


def keeps_low_bits(optimizer: str | None) -> bool:
    """Return True if the optimizer with this name can store the low bits that bfloat16 weights lack."""
    return optimizer in OPTIMIZERS and OPTIMIZERS[optimizer].keeps_low_bits


def has_two_backwards(plan: PlanParts) -> bool:
    """Return True if a step runs two backward passes: one for the norm of the gradients, and one for the updates."""
    return plan.optimizer.step_in_backward == "exact" and plan.batch.clips_norm


def recompute_settings_have_their_policy(plan: PlanParts) -> Iterator[PlanError]:
    """Reject settings of a different policy, a missing budget, and two budgets (in bytes and as a fraction)."""
    activation = plan.activation
    owners = {"every_n": "activation.every_n", "budget": "activation.budget_bytes activation.budget_fraction"}
    for policy, fields in owners.items():
        if activation.policy != policy:
            action = f"Set activation.policy to {policy!r}, or remove it"
            yield from set_fields(plan, fields, f"has no effect with policy {activation.policy!r}", action)
    if activation.policy != "budget":
        return
    given = [name for name in ("budget_bytes", "budget_fraction") if getattr(activation, name) is not None]
    if len(given) != 1:
        received = {name: getattr(activation, name) for name in given} or None
        action = "Use activation_checkpointing='6GiB', or a fraction such as 0.5"
        yield PlanError("activation.policy", received, "requires exactly one budget, in bytes or as a fraction", action)


def policy_goes_with_the_levers(plan: PlanParts) -> Iterator[PlanError]:
    """Reject the policy of an extension, which may save activations in its own form, with levers that also decide which
    tensors are saved, and a budget with levers that change the activations that were measured in a step."""
    policy, field = plan.activation.policy, "activation.policy"
    is_imported = isinstance(POLICIES.get(policy), ImportedChoice)
    if plan.compile.enabled and (is_imported or policy == "budget"):
        problem = "is not supported with compile=True, because the compiler selects the activations that a block saves"
        yield PlanError(field, policy, problem, "Use 'selective', 'full' or 'every_n', or compile=False")
    if plan.offload.activations != "none" and is_imported:
        problem = "is not supported with offload.activations, because its activations may not be tensors"
        yield PlanError(field, policy, problem, "Use another policy, or remove offload.activations")
    if has_two_backwards(plan) and policy == "budget":
        problem = "is not supported with step_in_backward='exact' and clipping, which require two backward passes"
        yield PlanError(field, policy, problem, "Use 'full', or remove one of the two settings")


def settings_have_their_lever(plan: PlanParts) -> Iterator[PlanError]:
    """Reject settings of the compiler or the chunked loss that have no effect."""
    compile = plan.compile
    if not compile.enabled:
        problem = "has no effect if compile.enabled is False"
        yield from set_fields(plan, "compile.backend compile.mode", problem, "Set compile.enabled to True")
    if compile.mode is not None and compile.backend not in (None, "inductor"):
        problem = f"is a setting of the backend 'inductor', not of {compile.backend!r}"
        yield PlanError("compile.mode", compile.mode, problem, "Remove the mode or the backend")
    if not plan.loss.chunked:
        action = "Set loss.chunked to True, or remove it"
        yield from set_fields(plan, "loss.chunk_tokens", "has no effect if loss.chunked is False", action)


def adapter_settings_have_adapters(plan: PlanParts) -> Iterator[PlanError]:
    """Reject adapter settings if ``lora_rank`` is None."""
    if plan.adapter.lora_rank is None:
        fields = " ".join(f"adapter.{name}" for name in FIELDS["adapter"])
        action = "Set lora_rank, for example to 8, or remove it"
        yield from set_fields(plan, fields, "has no effect without lora_rank", action)


def rounding_is_of_bf16_weights(plan: PlanParts) -> Iterator[PlanError]:
    """Reject a rounding setting if the weights are not bfloat16. Also reject bfloat16 weights that would silently lose
    updates."""
    optimizer, mode = plan.optimizer, plan.precision.mode
    rounding = optimizer.weight_rounding
    if mode != "bf16-true":
        problem = f"has no effect with precision {mode!r}, whose weights are not bfloat16"
        yield from set_fields(plan, "optimizer.weight_rounding", problem, "Remove it, or use 'bf16-true'")
    elif optimizer.name is None:
        problem = "has no effect on an optimizer that the module creates"
        action = f"Set optimizer.name to one of {', '.join(name for name in OPTIMIZERS if keeps_low_bits(name))}"
        yield from set_fields(plan, "optimizer.weight_rounding", problem, action)
    elif not keeps_low_bits(optimizer.name) and rounding != "nearest":
        problem = f"loses small updates of bfloat16 weights with optimizer {optimizer.name!r}"
        action = (
            "Use optimizer='adamw', which keeps small updates, or allow their loss with "
            "optimizer.weight_rounding='nearest'"
        )
        field, value = ("optimizer.weight_rounding", rounding) if rounding else ("precision.mode", mode)
        yield PlanError(field, value, problem, action)


def low_bit_states_have_supported_weights(plan: PlanParts) -> Iterator[PlanError]:
    """Reject quantized states with float64 weights, because the states would limit the precision."""
    name, mode = plan.optimizer.name, plan.precision.mode
    if name in ("adamw8bit", "adamw4bit") and mode == "64-true":
        problem = f"is not supported with precision {mode!r}, because its states are quantized"
        yield PlanError("optimizer.name", name, problem, "Use optimizer='adamw', or precision='32-true'")


def step_in_backward_gains_something(plan: PlanParts) -> Iterator[PlanError]:
    """Reject updates in the backward pass that save no memory or cannot work."""
    way = plan.optimizer.step_in_backward
    if way == "none":
        return
    field, strategy = "optimizer.step_in_backward", plan.parallel.strategy
    if plan.batch.accumulate_grad_batches > 1:
        problem = (
            "saves no memory with accumulate_grad_batches above 1, because gradients are kept between micro-batches"
        )
        action = "Use accumulate_grad_batches=1 with activation_checkpointing='full', or set step_in_backward=False"
        yield PlanError(field, way, problem, action)
    if plan.precision.mode == "16-mixed":
        problem = (
            "is not supported with precision '16-mixed', in which an infinite gradient causes the step to be skipped"
        )
        yield PlanError(field, way, problem, "Use precision='bf16-mixed', which needs no loss scale")
    if averages_itself(plan.optimizer.name):
        problem = (
            f"is not supported with optimizer {plan.optimizer.name!r}, which updates all parameters after backward"
        )
        yield PlanError(field, way, problem, "Use optimizer='adamw' with strategy='zero2' or 'zero3'")
    elif strategy in ("ddp", "zero1"):
        why = "whose buckets hold all gradients" if strategy == "ddp" else "which does not shard gradients"
        problem = f"saves no memory with strategy {strategy!r}, {why}"
        yield PlanError(field, way, problem, "Use strategy='zero2' or 'zero3', which shard gradients")
    if way == "stale_norm" and not plan.batch.clips_norm:
        problem = "requires clipping by norm, because it clips by the norm of the previous step"
        yield PlanError(field, way, problem, "Use 'exact', or set gradient_clip_val")
    elif plan.batch.clips_norm and plan.compile.enabled:
        problem = "requires two backward passes to clip by norm, but compiled blocks support one backward pass"
        action = "Use gradient_clip_algorithm='value', compile=False or step_in_backward=False"
        yield PlanError(field, way, problem, action)


def quantized_base_is_unsharded(plan: PlanParts) -> Iterator[PlanError]:
    """Reject a quantized base with sharded parameters, because quantized values cannot be sharded and cast like
    weights."""
    adapter, strategy = plan.adapter, plan.parallel.strategy
    if adapter.frozen_base != "as_is" and strategy not in ("single", "ddp", "auto"):
        problem = f"is not supported with strategy {strategy!r}, which shards parameters"
        action = "Use 'as_is', which shards the frozen weights, or use strategy='ddp'"
        yield PlanError("adapter.frozen_base", adapter.frozen_base, problem, action)


def kernel_is_of_the_device(plan: PlanParts) -> Iterator[PlanError]:
    """Reject a kernel that the named device does not support. With ``accelerator="auto"``, ``build`` checks the
    kernel."""
    kernel, accelerator = plan.attention.kernel, plan.parallel.accelerator
    lacking = {"cpu": ("efficient", "cudnn"), "mps": ("flash", "efficient", "cudnn")}.get(accelerator, ())
    if kernel in lacking:
        action = "Use 'auto', which selects the fastest kernel, or use 'math'"
        yield PlanError("attention.kernel", kernel, f"is not available on {accelerator}", action)


def unused_parameters_are_known_before_updates(plan: PlanParts) -> Iterator[PlanError]:
    """Reject updates during the forward or backward pass, and offloaded parameters, if ranks may skip units."""
    if not (plan.parallel.find_unused_parameters and plan.parallel.may_skip_units):
        return
    rejected = {
        "optimizer.step_in_backward": (plan.optimizer.step_in_backward, ("none",), "Set step_in_backward=False"),
        "offload.update": (plan.offload.update, ("auto", "plain"), "Use update='plain' in offload"),
        "offload.parameters": (plan.offload.parameters, ("none",), "Remove 'parameters' from offload"),
    }
    for field, (value, allowed, way) in rejected.items():
        if value not in allowed:
            problem = "is not supported with find_unused_parameters=True and a sharded strategy, because parameters "
            problem += "without a gradient are known only at the end of backward"
            yield PlanError(field, value, problem, f"{way}, or remove find_unused_parameters")


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
    unused parameters are known only after the backward pass. Otherwise, updates are deferred.
    """
    if plan.offload.update != "auto":
        return plan.offload.update
    if plan.parallel.may_skip_units:
        return "plain"
    clips_elements = plan.batch.gradient_clip_val is not None and not plan.batch.clips_norm
    waits = plan.parallel.strategy == "ddp" or plan.precision.mode == "16-mixed" or clips_elements
    waits = waits or plan.offload.parameters != "none"
    return "deferred" if waits or plan.offload.optimizer_states == "cpu" else "speculative"


def offload_settings_have_a_tier(plan: PlanParts) -> Iterator[PlanError]:
    """Reject settings of a tier that the plan does not use."""
    offload = plan.offload
    if not offload.uses_disk:
        action = "Remove it, or set a tier to 'disk', as in offload={'optimizer_states': 'disk'}"
        yield from set_fields(plan, "offload.folder", "has no effect without a tier on disk", action)
    elif offload.folder == "":
        yield PlanError("offload.folder", "", "must be the path of a folder", "Set a path, or None")
    action = "Remove it, or set offload.optimizer_states to 'cpu' or 'disk'"
    if offload.optimizer_states == "none":
        problem = "has no effect if the optimizer states are not offloaded"
        yield from set_fields(plan, "offload.share", problem, action)
    if offload.optimizer_states != "disk":
        problem = "has no effect if the optimizer states are not on disk"
        yield from set_fields(plan, "offload.buffers", problem, "Remove it, or set offload.optimizer_states to 'disk'")
    if offload.optimizer_states == offload.parameters == "none":
        problem = "has no effect if neither optimizer states nor parameters are offloaded"
        yield from set_fields(plan, "offload.update", problem, action)


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
    """Reject offloading with 1-bit Adam, which updates all parameters together, and with levers that update in the
    backward pass.
    """
    offload, lever = plan.offload, lever_that_frees_gradients(plan)
    field = _STATES if offload.optimizer_states != "none" else _PARAMETERS
    tier = getattr(offload, field.partition(".")[2])
    if tier == "none":
        return
    if averages_itself(plan.optimizer.name):
        problem = f"is not supported with optimizer {plan.optimizer.name!r}, which updates all parameters together"
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


LEVER_RULES: list[Callable[[PlanParts], Iterator[PlanError]]] = [
    recompute_settings_have_their_policy,
    policy_goes_with_the_levers,
    settings_have_their_lever,
    adapter_settings_have_adapters,
    rounding_is_of_bf16_weights,
    low_bit_states_have_supported_weights,
    step_in_backward_gains_something,
    unused_parameters_are_known_before_updates,
    quantized_base_is_unsharded,
    kernel_is_of_the_device,
    offload_settings_have_a_tier,
    parameters_are_sharded_or_single,
    offloaded_updates_have_their_optimizer,
    speculation_has_reduced_gradients,
]
