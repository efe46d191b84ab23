"""Rules for levers: combinations that cannot work, and combinations that save no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roomier.core.errors import PlanError
from roomier.plan.choices import OPTIMIZERS, POLICIES, ImportedChoice
from roomier.plan.parts import PlanParts


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
    owners = {"every_n": "every_n", "budget_bytes": "budget", "budget_fraction": "budget"}
    for name, policy in owners.items():
        value = getattr(activation, name)
        if value is not None and activation.policy != policy:
            action = f"Set activation.policy to {policy!r}, or remove it"
            problem = f"has no effect with policy {activation.policy!r}"
            yield PlanError(f"activation.{name}", value, problem, action)
    if activation.policy != "budget":
        return
    given = [name for name in ("budget_bytes", "budget_fraction") if getattr(activation, name) is not None]
    if len(given) != 1:
        received = {name: getattr(activation, name) for name in given} or None
        action = "Use activation_checkpointing='6GiB', or a fraction such as 0.5"
        yield PlanError("activation.policy", received, "requires exactly one budget, in bytes or as a fraction", action)


def imported_policy_is_alone(plan: PlanParts) -> Iterator[PlanError]:
    """Reject the policy of an extension, which may save activations in its own form, in combination with levers that
    also decide which tensors are saved."""
    policy = plan.activation.policy
    if not isinstance(POLICIES.get(policy), ImportedChoice):
        return
    if plan.compile.enabled:
        problem = "is not supported with compile=True, because the compiler selects the activations that a block saves"
        yield PlanError("activation.policy", policy, problem, "Use 'selective', 'full' or 'every_n', or compile=False")
    if plan.offload.activations != "none":
        problem = "is not supported with offload.activations, because its activations may not be tensors"
        yield PlanError("activation.policy", policy, problem, "Use another policy, or remove offload.activations")


def budget_can_be_measured(plan: PlanParts) -> Iterator[PlanError]:
    """Reject a budget in combination with levers that change the activations that were measured in a step."""
    if plan.activation.policy != "budget":
        return
    field = "activation.policy"
    if plan.compile.enabled:
        problem = "is not supported with compile=True, because the compiler selects the activations that a block saves"
        yield PlanError(field, "budget", problem, "Use 'selective', 'full' or 'every_n', or compile=False")
    if has_two_backwards(plan):
        problem = "is not supported with step_in_backward='exact' and clipping, which require two backward passes"
        yield PlanError(field, "budget", problem, "Use 'full', or remove one of the two settings")


def settings_have_their_lever(plan: PlanParts) -> Iterator[PlanError]:
    """Reject settings of the compiler or the chunked loss that have no effect."""
    compile = plan.compile
    for name in ("backend", "mode"):
        if getattr(compile, name) is not None and not compile.enabled:
            problem = "has no effect if compile.enabled is False"
            yield PlanError(f"compile.{name}", getattr(compile, name), problem, "Set compile.enabled to True")
    if compile.mode is not None and compile.backend not in (None, "inductor"):
        problem = f"is a setting of the backend 'inductor', not of {compile.backend!r}"
        yield PlanError("compile.mode", compile.mode, problem, "Remove the mode or the backend")
    if plan.loss.chunk_tokens is not None and not plan.loss.chunked:
        problem = "has no effect if loss.chunked is False"
        yield PlanError("loss.chunk_tokens", plan.loss.chunk_tokens, problem, "Set loss.chunked to True, or remove it")


def adapter_settings_have_adapters(plan: PlanParts) -> Iterator[PlanError]:
    """Reject adapter settings if ``lora_rank`` is None."""
    adapter = plan.adapter
    if adapter.lora_rank is not None:
        return
    settings = {
        "lora_alpha": None,
        "lora_dropout": 0.0,
        "lora_targets": "blocks",
        "lora_trained": "",
        "frozen_base": "as_is",
    }
    for name, default in settings.items():
        if getattr(adapter, name) != default:
            action = "Set lora_rank, for example to 8, or remove it"
            yield PlanError(f"adapter.{name}", getattr(adapter, name), "has no effect without lora_rank", action)


def rounding_is_of_bf16_weights(plan: PlanParts) -> Iterator[PlanError]:
    """Reject a rounding setting if the weights are not bfloat16. Also reject bfloat16 weights that would silently lose
    updates."""
    optimizer, mode = plan.optimizer, plan.precision.mode
    rounding = optimizer.weight_rounding
    if mode != "bf16-true":
        if rounding is not None:
            problem = f"has no effect with precision {mode!r}, whose weights are not bfloat16"
            yield PlanError("optimizer.weight_rounding", rounding, problem, "Remove it, or use 'bf16-true'")
        return
    if optimizer.name is None:
        if rounding is not None:
            problem = "has no effect on an optimizer that the module creates"
            action = f"Set optimizer.name to one of {', '.join(name for name in OPTIMIZERS if keeps_low_bits(name))}"
            yield PlanError("optimizer.weight_rounding", rounding, problem, action)
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
    """Reject updates in backward that save no memory or cannot work."""
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
    if plan.optimizer.name == "onebit_adam":
        problem = "is not supported with optimizer 'onebit_adam', which updates all parameters after backward"
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
    """Reject updates during backward or forward, and offloaded parameters, if ranks may skip units."""
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


LEVER_RULES: list[Callable[[PlanParts], Iterator[PlanError]]] = [
    recompute_settings_have_their_policy,
    imported_policy_is_alone,
    budget_can_be_measured,
    settings_have_their_lever,
    adapter_settings_have_adapters,
    rounding_is_of_bf16_weights,
    low_bit_states_have_supported_weights,
    step_in_backward_gains_something,
    unused_parameters_are_known_before_updates,
    quantized_base_is_unsharded,
    kernel_is_of_the_device,
]
