"""Checks before a run starts. The checks reject unsupported calls, optimizers, hooks and callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user
from roomier.api.callback import Callback, KeepsWeights
from roomier.api.datamodule import DataModule
from roomier.api.module import Module
from roomier.api.overrides import check_hook_names, is_one, overrides
from roomier.core.errors import RoomierError
from roomier.plan import Plan
from roomier.plan.levers import lever_that_frees_gradients
from roomier.planner.stages import GRADIENT_HOOKS
from roomier.run.settled import Request
from roomier.techniques.optim.closures import assumes_closure
from roomier.techniques.optim.configured import Configured

SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")


def check_call(request: Request) -> None:
    """Check a call before the call changes any state.

    Raises:
        RoomierError: the Trainer or the model is in use, the module does not define the step or does not
            support the plan, or the data is ambiguous.
    """
    stage, module, datamodule, trainer = request.stage, request.module, request.datamodule, request.trainer
    if request.state.stage is not None:
        action = "Wait for the current call to return. To validate during fit, set val_check_interval"
        problem = "cannot be called while this Trainer is running"
        raise RoomierError(stage, type(module).__name__, problem, action)
    for part in module.modules():
        other = vars(part).get("_trainer")
        if other is not trainer and getattr(other, "is_running", False):  # else Lightning's, or idle
            problem = (
                f"another Trainer is running this module, and {stage} would remove the changes that the other Trainer "
                "made to it"
            )
            action = "Pass copy.deepcopy(model), or wait for the other run to finish"
            raise RoomierError("model", type(part).__name__, problem, action)
    step = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}.get(stage)
    if step is not None and not overrides(module, step, Module):
        action = f"Define {step}(self, batch, batch_idx){' and return the loss' * (stage == 'fit')}"
        raise RoomierError(step, type(module).__name__, f"the module does not define {step}", action)
    size = request.plan.parallel.pipeline_parallel_size
    if size > 1 and not module.automatic_optimization:
        problem = "is not supported with manual optimization, because a schedule determines the backward passes"
        action = "Use pipeline_parallel_size=1, or use automatic optimization"
        raise RoomierError("pipeline_parallel_size", size, problem, action)
    check_hook_names(seen_by_user(module), Module)
    if datamodule is None:
        return
    if not is_one(datamodule, DataModule):
        action = "Pass an instance of a roomier.DataModule subclass, or pass loaders to the other arguments"
        raise RoomierError("datamodule", datamodule, "must be a DataModule", action)
    passed = [f"{name}_dataloaders" for name, loader in request.loaders.items() if loader is not None]
    if passed:
        problem, action = f"cannot be combined with {' and '.join(passed)}", "Pass either a DataModule or loaders"
        raise RoomierError("datamodule", type(datamodule).__name__, problem, action)
    check_hook_names(datamodule, DataModule)


def check_modes(plan: Plan, callbacks: Sequence[Any], module: Module, configured: Configured, num_ranks: int) -> None:
    """Check that the optimizers and hooks of a fit are compatible with its plan.

    Raises:
        RoomierError: an optimizer or a hook is not supported with the plan.
    """
    batch = plan.batch
    check_hooks_need_no_gradients(plan, callbacks, module)
    if module.automatic_optimization:
        if len(configured.optimizers) > 1:
            raise RoomierError(
                "configure_optimizers",
                f"{len(configured.optimizers)} optimizers",
                "automatic optimization supports only one optimizer",
                "Set self.automatic_optimization = False and step the optimizers in training_step, "
                "or use one optimizer with several parameter groups",
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
                "is not supported with manual optimization (automatic_optimization=False)",
                "In training_step, clip with self.clip_gradients(optimizer, ...), and accumulate by stepping every n "
                "batches",
            )


def check_hooks_need_no_gradients(plan: Plan, callbacks: Sequence[Any], module: Module) -> None:
    """Check that no hook reads gradients if ``plan`` frees each gradient during the backward pass.

    Raises:
        RoomierError: a hook reads gradients.
    """
    lever = lever_that_frees_gradients(plan)
    if lever is None:
        return
    keyword, way = lever.keyword, lever.value(plan)
    if plan.batch.clips_norm and overrides(module, "backward", Module):
        problem = f"{type(module).__name__} overrides backward, but clipping by norm runs backward twice per step"
        action = f"Remove the override, set gradient_clip_algorithm='value', or remove {keyword}"
        raise RoomierError(keyword, way, problem, action)
    in_module = [(module, name) for name in SEES_GRADIENTS if overrides(module, name, Module)]
    in_callbacks = [
        (callback, name)
        for callback in callbacks
        for name in SEES_GRADIENTS
        if hasattr(Callback, name) and overrides(callback, name, Callback)
    ]
    for owner, name in (*in_module, *in_callbacks):
        problem = (
            f"{type(owner).__name__}.{name} cannot access gradients, because each gradient is freed during backward"
        )
        instead = getattr(owner, "without_gradients", "Change each gradient in on_gradient instead, remove the hook")
        raise RoomierError(keyword, way, problem, f"{instead}, or remove {keyword}")


def check_supports_stages(plan: Plan, callbacks: Sequence[Any], module: Module) -> None:
    """Check that no hook or callback of a fit requires the full model, or the backward pass of the loss on each rank.

    Raises:
        RoomierError: a hook or a callback is not supported.
    """
    if plan.parallel.pipeline_parallel_size == 1:
        return
    problem = "is not supported with stages, of which each rank has only one"
    for name in ("backward", "optimizer_step"):
        if overrides(module, name, Module):
            action = f"Remove {name}, or use pipeline_parallel_size=1"
            raise RoomierError(name, type(module).__name__, problem, action)
    for each in callbacks:
        if isinstance(each, KeepsWeights):
            raise RoomierError("callbacks", type(each).__name__, problem, "Remove it, or use pipeline_parallel_size=1")
    if plan.parallel.stages_per_rank == 1:
        return
    # The stages of a rank run a micro-batch at different times, and other micro-batches in between.
    problem = "is not supported with several stages per rank, which run parts of different micro-batches in turn"
    for name, owners in {"on_train_batch_start": [], "on_after_backward": callbacks}.items():
        found = [each for each in owners if overrides(each, name, Callback)]
        if overrides(module, name, Module) or found:
            action = f"Remove {name}, or use stages_per_rank=1 and schedule='1f1b'"
            raise RoomierError(name, type(found[0] if found else module).__name__, problem, action)


def check_hooks_allow_stages(plan: Plan, callbacks: Sequence[Any]) -> None:
    """Check that no callback reads the loss, gradients or outputs of a step, if the planner divides the model.

    Raises:
        RoomierError: a callback has such a hook.
    """
    if plan.parallel.pipeline_parallel_size == 1:
        return
    for each in callbacks:
        is_own = type(each).__module__.startswith("roomier.")
        for name in (*GRADIENT_HOOKS, *(() if is_own else ("on_train_batch_end",))):
            if hasattr(Callback, name) and overrides(each, name, Callback):
                problem = f"{type(each).__name__}.{name} would receive the loss, gradients or outputs of one stage only"
                raise RoomierError("callbacks", name, problem, "Set pipeline_parallel_size in the dict of the strategy")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer``, such as LBFGS, requires a closure, which it may call several times per step."""
    kind: Any = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        return closure is not None
    return not kind.__module__.startswith(("torch.", "roomier.")) and assumes_closure(kind)


def _check_allows_closures(plan: Plan, optimizer: Optimizer, num_ranks: int) -> None:
    # The optimizer evaluates the loss of one micro-batch on one rank, but would use it as the loss of the global batch.
    by_hand = "or set self.automatic_optimization = False and call optimizer.step(closure=...)"
    size, mode = plan.batch.accumulate_grad_batches, plan.precision.mode
    for field, value, is_possible, action in (
        ("accumulate_grad_batches", size, size == 1, "Use accumulate_grad_batches=1 with a larger batch"),
        ("devices", num_ranks, num_ranks == 1, "Use one device or another optimizer"),
        ("precision", mode, mode != "16-mixed", "Use precision='bf16-mixed' or '32-true'"),
    ):
        if not is_possible:
            name = type(optimizer).__name__
            problem = f"is not supported with {name}, which evaluates the loss several times per step"
            raise RoomierError(field, value, problem, f"{action}, {by_hand}")


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Check that all ``callbacks`` are distinct instances of Callback and that their states have distinct keys.

    Raises:
        RoomierError: an entry is not a Callback, is in the list twice, or has the same ``state_key`` as another
            callback.
    """
    seen: dict[str, Any] = {}
    for callback in callbacks:
        if not is_one(callback, Callback):
            if isinstance(callback, type):
                raise RoomierError(
                    "callbacks", callback, "must be an instance, not a class", f"Pass {callback.__name__}(...)"
                )
            raise RoomierError(
                "callbacks", callback, "must be a Callback", "Pass instances of subclasses of roomier.Callback"
            )
        if any(callback is other for other in seen.values()):
            problem = "is in the list twice, so its hooks would run twice"
            raise RoomierError("callbacks", callback, problem, "Remove one of the two entries")
        if callback.state_key in seen and callback.state_dict():
            problem = "is the state_key of two callbacks, so one state would overwrite the other"
            action = "Remove one of the callbacks, or override state_key"
            raise RoomierError("callbacks", callback.state_key, problem, action)
        seen[callback.state_key] = callback
