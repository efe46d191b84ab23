"""LambdaCallback: callback whose hooks are passed as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roomier.api.callback import Callback
from roomier.core.errors import RoomierError, did_you_mean

HOOKS = frozenset(name for name in vars(Callback) if name in ("setup", "teardown") or name.startswith("on_"))


class LambdaCallback(Callback):
    """Callback that calls the given functions as its hooks.

    Args:
        hooks: functions, each passed under the name of a hook of :class:`Callback`. Each function receives the
            arguments of its hook. A value of None is ignored.

    Raises:
        RoomierError: the hook does not exist, or the value is not callable.

    Example:
        >>> LambdaCallback(on_train_start=lambda trainer, module: print(trainer.global_rank))
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, hook in hooks.items():
            if name not in HOOKS:
                raise RoomierError("LambdaCallback", name, "is not a hook of a callback", did_you_mean(name, HOOKS))
            if hook is None:
                continue
            if not callable(hook):
                raise RoomierError(f"LambdaCallback({name})", hook, "must be callable", "Pass a function or a lambda")
            setattr(self, name, hook)
