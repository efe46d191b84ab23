"""Rules of the levers that work on one device as on several: what cannot go together, and what would gain nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from roomier.core.errors import PlanError

if TYPE_CHECKING:
    from roomier.plan.plan import Plan

KEEPS_MASTERS = ("adamw", "adamw8bit", "adamw4bit", "lion")
"""Optimizers that can keep what bfloat16 weights round away."""


def rounding_in_force(plan: Plan) -> str | None:
    """How weights of bfloat16 are rounded; None where there are none, or where the module's own optimizer rounds."""
    optimizer = plan.optimizer
    if plan.precision.mode != "bf16-true" or optimizer.name is None:
        return None
    return optimizer.weight_rounding or "split"


def has_two_backwards(plan: Plan) -> bool:
    """Return whether a step computes the norm of the gradients in a first backward, before it updates in a second."""
    return plan.optimizer.step_in_backward == "exact" and plan.batch.clips_norm


def recompute_settings_have_their_policy(plan: Plan) -> Iterator[PlanError]:
    """A number without its policy would be ignored; a budget is one number."""
    activation = plan.activation
    owners = {"every_n": "every_n", "budget_bytes": "budget", "budget_fraction": "budget"}
    for name, policy in owners.items():
        value = getattr(activation, name)
        if value is not None and activation.policy != policy:
            action = f"Set activation.policy to {policy!r}, or leave it out"
            problem = f"has no effect with policy {activation.policy!r}"
            yield PlanError(f"activation.{name}", value, problem, action)
    if activation.policy != "budget":
        return
    given = [name for name in ("budget_bytes", "budget_fraction") if getattr(activation, name) is not None]
    if len(given) != 1:
        received = {name: getattr(activation, name) for name in given} or None
        action = "Write activation_checkpointing='6GiB', or a fraction such as 0.5"
        yield PlanError("activation.policy", received, "a budget is either bytes or a fraction", action)


def budget_is_of_what_is_measured(plan: Plan) -> Iterator[PlanError]:
    """A budget is kept by what one step measured; some levers make other steps out of it."""
    if plan.activation.policy != "budget":
        return
    field = "activation.policy"
    if plan.compile.enabled:
        problem = "does not go with compile=True: the compiler decides again what a compiled block keeps"
        yield PlanError(field, "budget", problem, "Use 'selective', 'full' or 'every_n', or compile=False")
    if has_two_backwards(plan):
        problem = "does not go with step_in_backward='exact' and clipping, where activations live through two backwards"
        yield PlanError(field, "budget", problem, "Use 'full', or leave out one of the two")


def chunks_have_a_chunked_loss(plan: Plan) -> Iterator[PlanError]:
    """A chunk size alone would be ignored."""
    if plan.loss.chunk_tokens is not None and not plan.loss.chunked:
        problem = "has no effect while loss.chunked is False"
        yield PlanError(
            "loss.chunk_tokens", plan.loss.chunk_tokens, problem, "Set loss.chunked to True, or leave it out"
        )


def adapter_settings_have_adapters(plan: Plan) -> Iterator[PlanError]:
    """Without a rank there are no adapters, and no frozen base."""
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
            action = "Give lora_rank as well, such as 8, or leave it out"
            yield PlanError(f"adapter.{name}", getattr(adapter, name), "has no effect without lora_rank", action)


def rounding_is_of_bf16_weights(plan: Plan) -> Iterator[PlanError]:
    """Weights of 32 bits need no care; bfloat16 weights lose updates, which is never done silently."""
    optimizer, mode = plan.optimizer, plan.precision.mode
    rounding = optimizer.weight_rounding
    if mode != "bf16-true":
        if rounding is not None:
            problem = f"has no effect in precision {mode!r}, whose weights are not bfloat16"
            yield PlanError("optimizer.weight_rounding", rounding, problem, "Leave it out, or use 'bf16-true'")
        return
    if optimizer.name is None:
        if rounding is not None:
            problem = "is of optimizers by name; the module's own rounds as it does"
            yield PlanError("optimizer.weight_rounding", rounding, problem, f"Name one of {', '.join(KEEPS_MASTERS)}")
    elif optimizer.name not in KEEPS_MASTERS and rounding != "nearest":
        problem = f"optimizer {optimizer.name!r} loses the updates that bfloat16 weights round away"
        action = "Use optimizer='adamw', which keeps them, or accept it: optimizer.weight_rounding='nearest'"
        field, value = ("optimizer.weight_rounding", rounding) if rounding else ("precision.mode", mode)
        yield PlanError(field, value, problem, action)


def states_in_few_bits_are_of_known_weights(plan: Plan) -> Iterator[PlanError]:
    """Codes stand for float32 numbers; beside float64 weights they would be what is least exact."""
    name, mode = plan.optimizer.name, plan.precision.mode
    if name in ("adamw8bit", "adamw4bit") and mode == "64-true":
        problem = f"does not go with precision {mode!r}: its states are rounded to a few bits"
        yield PlanError("optimizer.name", name, problem, "Use optimizer='adamw', or precision='32-true'")


def step_in_backward_gains_something(plan: Plan) -> Iterator[PlanError]:
    """Where gradients must live until all are there, updating them one by one saves nothing."""
    way = plan.optimizer.step_in_backward
    if way == "none":
        return
    field, strategy = "optimizer.step_in_backward", plan.parallel.strategy
    if plan.batch.accumulate_grad_batches > 1:
        problem = "saves nothing with accumulate_grad_batches above 1: whole gradients live until the last micro-batch"
        action = "Use one larger micro-batch with activation_checkpointing='full', or strategy='zero2' in its place"
        yield PlanError(field, way, problem, action)
    if plan.precision.mode == "16-mixed":
        problem = "does not go with 16-mixed, where one infinite gradient leaves out the whole step"
        yield PlanError(field, way, problem, "Use precision='bf16-mixed', whose gradients need no loss scale")
    if plan.optimizer.name == "onebit_adam":
        problem = "does not go with onebit_adam, which sends the signs of all gradients together, after the backward"
        yield PlanError(field, way, problem, "Use optimizer='adamw' with strategy='zero2' or 'zero3'")
    elif strategy in ("ddp", "zero1"):
        when = "its buckets hold the gradients of the whole model" if strategy == "ddp" else "its gradients stay whole"
        problem = f"saves nothing with strategy {strategy!r}: {when}"
        yield PlanError(field, way, problem, "Use strategy='zero2' or 'zero3', which cut the gradients")
    if way == "stale_norm" and not plan.batch.clips_norm:
        problem = "clips by the norm of the step before, but no norm is clipped"
        yield PlanError(field, way, problem, "Use 'exact', or set gradient_clip_val")
    elif plan.batch.clips_norm and plan.compile.enabled:
        problem = "takes the norm of the gradients in a first backward, but compiled blocks run one backward"
        action = "Use gradient_clip_algorithm='value', compile=False, or strategy='zero2' or 'zero3' in its place"
        yield PlanError(field, way, problem, action)


def base_in_few_bits_is_whole(plan: Plan) -> Iterator[PlanError]:
    """Codes are no numbers that could be cut among ranks and gathered in another dtype."""
    adapter, strategy = plan.adapter, plan.parallel.strategy
    if adapter.frozen_base != "as_is" and strategy not in ("single", "ddp", "auto"):
        problem = f"does not go with strategy {strategy!r}, which cuts weights among the ranks"
        action = "Use 'as_is', whose frozen weights are cut, or strategy='ddp'"
        yield PlanError("adapter.frozen_base", adapter.frozen_base, problem, action)


def kernel_is_of_the_device(plan: Plan) -> Iterator[PlanError]:
    """Where the device is named, the kernels it lacks are known; else the build looks."""
    kernel, accelerator = plan.attention.kernel, plan.parallel.accelerator
    lacking = {"cpu": ("efficient", "cudnn"), "mps": ("flash", "efficient", "cudnn")}.get(accelerator, ())
    if kernel in lacking:
        action = "Use 'auto', which takes the fastest, or 'math'"
        yield PlanError("attention.kernel", kernel, f"does not exist on {accelerator}", action)


LEVER_RULES: list[Callable[[Plan], Iterator[PlanError]]] = [
    recompute_settings_have_their_policy,
    budget_is_of_what_is_measured,
    chunks_have_a_chunked_loss,
    adapter_settings_have_adapters,
    rounding_is_of_bf16_weights,
    states_in_few_bits_are_of_known_weights,
    step_in_backward_gains_something,
    base_in_few_bits_is_whole,
    kernel_is_of_the_device,
]
