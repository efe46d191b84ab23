"""What is refused before a run does anything: calls, optimizers and callbacks that cannot work."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user
from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.misspelled import check_hook_names
from roomier.api.module import Module
from roomier.api.overrides import is_one, overrides
from roomier.core.errors import RoomierError
from roomier.optim.configured import Configured
from roomier.plan import Plan
from roomier.run.settled import Request

SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")


def check_call(request: Request) -> None:
    """Check a call before anything changes.

    Raises:
        RoomierError: the Trainer or the model is busy, the module lacks the step, or the data is ambiguous.
    """
    stage, module, datamodule, trainer = request.stage, request.module, request.datamodule, request.trainer
    if request.state.stage is not None:
        action = "Call it when that is over; to validate within a fit, use val_check_interval"
        raise RoomierError(stage, type(module).__name__, "is called while this Trainer is running", action)
    for part in module.modules():
        other = vars(part).get("_trainer")
        if other is not trainer and getattr(other, "is_running", False):  # else it is Lightning's, or is done with it
            problem = f"another Trainer is running it, and this {stage} would take away what that put in place"
            action = "Give this one a copy, copy.deepcopy(model), or call it when that run is over"
            raise RoomierError("model", type(part).__name__, problem, action)
    step = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(stage)
    if step is not None and not overrides(module, step, Module):
        action = f"Define {step}(self, batch, batch_idx){' and return the loss' * (stage == 'fit')}"
        raise RoomierError(step, type(module).__name__, f"the module does not define {step}", action)
    check_hook_names(seen_by_user(module), Module)
    if datamodule is None:
        return
    if not is_one(datamodule, DataModule):
        action = "Pass an object of a subclass of roomier.DataModule; loaders go to the other arguments"
        raise RoomierError("datamodule", datamodule, "is not a DataModule", action)
    passed = [f"{name}_dataloaders" for name, loader in request.loaders.items() if loader is not None]
    if passed:
        problem = f"{' and '.join(passed)} were passed as well"
        raise RoomierError("datamodule", type(datamodule).__name__, problem, "Pass one of the two")
    check_hook_names(datamodule, DataModule)


def check_modes(plan: Plan, callbacks: Sequence[Any], module: Module, configured: Configured, num_ranks: int) -> None:
    """Check that the optimizers and hooks of a fit are compatible with its plan.

    Raises:
        RoomierError: they are not.
    """
    batch = plan.batch
    check_hooks_need_no_gradients(plan, callbacks, module)
    if module.automatic_optimization:
        if len(configured.optimizers) > 1:
            raise RoomierError(
                "configure_optimizers",
                f"{len(configured.optimizers)} optimizers",
                "automatic optimization steps one",
                "Set self.automatic_optimization = False and step them in training_step, "
                "or put the parameters into groups of one optimizer",
            )
        for optimizer in configured.optimizers:
            if needs_closure(optimizer):
                _check_allows_closures(plan, optimizer, num_ranks)
        return
    for field, value, default in (
        ("accumulate_grad_batches", batch.accumulate_grad_batches, 1),
        ("gradient_clip_val", batch.gradient_clip_val, None),
    ):
        if value != default:
            raise RoomierError(
                field,
                value,
                "the module optimizes by hand (automatic_optimization=False)",
                "Do it in training_step: self.clip_gradients(optimizer, ...), step every n batches",
            )


def check_hooks_need_no_gradients(plan: Plan, callbacks: Sequence[Any], module: Module) -> None:
    """Refuse hooks that look at gradients where ``plan`` frees each within the backward.

    Raises:
        RoomierError: there is one.
    """
    way = plan.optimizer.step_in_backward
    if way == "none":
        return
    if plan.batch.clips_norm and overrides(module, "backward", Module):
        problem = f"{type(module).__name__} overrides backward, which clipping by norm would run twice in a step"
        action = "Do without it, clip by value, or leave out step_in_backward"
        raise RoomierError("step_in_backward", way, problem, action)
    in_module = [(module, name) for name in SEES_GRADIENTS if overrides(module, name, Module)]
    in_callbacks = [
        (callback, name)
        for callback in callbacks
        for name in SEES_GRADIENTS
        if hasattr(Callback, name) and overrides(callback, name, Callback)
    ]
    for owner, name in (*in_module, *in_callbacks):
        problem = f"{type(owner).__name__}.{name} would find no gradients: each is used and freed within the backward"
        raise RoomierError("step_in_backward", way, problem, "Do without it, or leave out step_in_backward")


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` computes the loss by itself, maybe several times a step, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_allows_closures(plan: Plan, optimizer: Optimizer, num_ranks: int) -> None:
    # It looks at the loss of one micro-batch on one rank, and would take it for that of the whole batch.
    by_hand = "or set self.automatic_optimization = False and call optimizer.step(closure=...)"
    size, mode = plan.batch.accumulate_grad_batches, plan.precision.mode
    for field, value, is_possible, action in (
        ("accumulate_grad_batches", size, size == 1, "Give the whole batch at once"),
        ("devices", num_ranks, num_ranks == 1, "Train on one device, or with another optimizer"),
        ("precision", mode, mode != "16-mixed", "Use precision='bf16-mixed' or '32-true'"),
    ):
        if not is_possible:
            problem = f"{type(optimizer).__name__} computes the loss of a step several times by itself"
            raise RoomierError(field, value, problem, f"{action}, {by_hand}")


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse what is no callback, and two whose states would be stored under one name."""
    seen: dict[str, Any] = {}
    for callback in callbacks:
        if not is_one(callback, Callback):
            if isinstance(callback, type):
                raise RoomierError(
                    "callbacks", callback, "is a class", f"Make an object of it: {callback.__name__}(...)"
                )
            raise RoomierError(
                "callbacks", callback, "is not a Callback", "Pass objects of subclasses of roomier.Callback"
            )
        if any(callback is other for other in seen.values()):
            raise RoomierError("callbacks", callback, "is given twice, so it would be called twice", "Name it once")
        if callback.state_key in seen and callback.state_dict():
            raise RoomierError(
                "callbacks",
                callback.state_key,
                "two callbacks have this state_key, so one state would overwrite the other",
                "Remove one, or override state_key",
            )
        seen[callback.state_key] = callback
