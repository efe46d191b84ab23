"""Table of the overridden hooks. The table is built once before the loop, so hooks that are not overridden cost no
time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from roomier.api.adapt import seen_by_user
from roomier.api.callback import Callback
from roomier.api.lightning_callbacks import watches_metric
from roomier.api.module import Module
from roomier.api.overrides import overrides

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView

Hook = Callable[..., Any]

# Each of these hooks is called on callbacks (with the trainer and the module as first arguments) and on the module
# (without these arguments).
SHARED_HOOKS = (
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_gradient",
    "on_before_optimizer_step",
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
