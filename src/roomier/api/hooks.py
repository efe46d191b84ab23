"""Table of the overridden hooks. The table is built once before the loop, so hooks that are not overridden cost no
time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from roomier.api.adapt import seen_by_user
from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.overrides import overrides, watches_metric
from roomier.core.errors import RoomierError, TrainingError

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView


Hook = Callable[..., Any]

# Each of these hooks is called on callbacks (with the trainer and the module as first arguments) and on the module
# (without these arguments).
SHARED_HOOKS = (
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start"),
    *("on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_gradient", "on_before_optimizer_step"),
    *(
        f"on_{stage}_{moment}"
        for stage in ("validation", "test", "predict")
        for moment in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    ),
)
_HOOKS_OF_STEPS = (
    *(name for name in SHARED_HOOKS if "train" in name or "before" in name or "after" in name),
    "on_save_point",
)
CALLBACK_HOOKS = ("on_sanity_check_start", "on_sanity_check_end", "on_save_point")


class HookTable:
    """Table of the hooks to call. Each hook is an attribute: ``table.on_train_batch_start`` is a tuple of functions.

    Hooks of callbacks run before the hook of the module. At the end of a training epoch, callbacks that monitor a
    metric run after the module, because the module may log the metric in its hook.
    """

    def __init__(self, trainer: TrainerView, module: Module, callbacks: Iterable[Callback]) -> None:
        callbacks, seen = tuple(callbacks), seen_by_user(module)
        for name in (*SHARED_HOOKS, *CALLBACK_HOOKS):
            hooks, late_hooks = list[Hook](), list[Hook]()
            for callback in callbacks:
                if overrides(callback, name, Callback):
                    is_late = watches_metric(callback) and name == "on_train_epoch_end"
                    (late_hooks if is_late else hooks).append(partial(getattr(callback, name), trainer, seen))
            if name in SHARED_HOOKS and overrides(module, name, Module):
                hooks.append(getattr(module, name))
            setattr(self, name, (*hooks, *late_hooks))

    def complete_updates_before(self, complete: Callable[[], None]) -> None:
        """Make the hooks of a training step call ``complete`` first, except hooks that do not read parameters."""

        def completed(name: str, hook: Hook) -> Hook:
            function = hook.func if isinstance(hook, partial) else hook
            owner = getattr(function, "__self__", None)
            if isinstance(owner, Callback) and not _reads_parameters(type(owner), name):
                return hook

            @wraps(function)
            def call(*args: Any) -> Any:
                complete()
                return hook(*args)

            return call

        for name in _HOOKS_OF_STEPS:
            setattr(self, name, tuple(completed(name, hook) for hook in getattr(self, name)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Hook, ...]: ...


def _reads_parameters(kind: type[Callback], name: str) -> bool:
    """Return the ``reads_parameters`` attribute of the class that defines the hook named ``name``.

    A subclass that overrides the hook must set the attribute again.
    """
    definer = next((each for each in kind.__mro__ if name in vars(each)), Callback)
    return bool(vars(definer).get("reads_parameters", True))


def step_of(module: Module, name: str, num_given: int = 2) -> Callable[..., Any]:
    """Return a function that calls the method named ``name`` with the arguments among batch, batch_idx and
    dataloader_idx that the method accepts.

    If the method has the argument ``dataloader_iter``, as in Lightning, it receives an iterator over the batch of the
    step, which yields ``(batch, batch_idx, dataloader_idx)``. A step cannot read ahead in the loader, because a run
    could not resume at the position of the step.

    Args:
        module: module that defines the method.
        name: name of a step method, such as ``"training_step"``.
        num_given: number of arguments that the caller passes.

    Raises:
        RoomierError: the method accepts no argument, or requires more than ``num_given``.
    """
    step: Callable[..., Any] = getattr(module, name)
    signature = inspect.signature(step)
    parameters = signature.parameters.values()
    if "dataloader_iter" in signature.parameters:
        return partial(_read_by, step, name)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return step
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not named or sum(p.default is p.empty for p in named) > num_given:
        arguments = ", ".join(("batch", "batch_idx", "dataloader_idx")[:num_given])
        action = f"Define it as {name}(self, {arguments})"
        raise RoomierError(name, str(signature), f"is called with ({arguments})", action)
    if len(named) >= num_given:
        return step
    return lambda *arguments: step(*arguments[: len(named)])


def _read_by(step: Callable[..., Any], name: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
    batches = _one_batch(name, (batch, batch_idx, dataloader_idx))
    output = step(batches)
    if inspect.getgeneratorstate(batches) == inspect.GEN_CREATED:
        problem = "did not read the batch of its step from dataloader_iter, so the batch would be lost"
        raise TrainingError(name, "dataloader_iter", problem, "Call next(dataloader_iter) once in each step")
    return output


def _one_batch(name: str, item: tuple[Any, int, int]) -> Generator[Any, None, None]:
    yield item
    problem = "reads more than one batch from dataloader_iter in a step, so the run could not resume exactly"
    raise TrainingError(name, "dataloader_iter", problem, "Call next(dataloader_iter) once in each step")
