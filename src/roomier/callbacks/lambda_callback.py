"""LambdaCallback: hooks given as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roomier.api.callback import Callback
from roomier.core.errors import RoomierError, did_you_mean

HOOKS = frozenset(name for name in vars(Callback) if name in ("setup", "teardown") or name.startswith("on_"))


class LambdaCallback(Callback):
    """Calls the functions it is given: ``LambdaCallback(on_train_start=lambda trainer, module: ...)``.

    Args:
        hooks: any hook of :class:`Callback` by name; each gets what that hook gets. None is left out.

    Raises:
        RoomierError: there is no such hook, or what is given is no function.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, hook in hooks.items():
            if name not in HOOKS:
                raise RoomierError("LambdaCallback", name, "is no hook of a callback", did_you_mean(name, HOOKS))
            if hook is None:
                continue
            if not callable(hook):
                raise RoomierError(f"LambdaCallback({name})", hook, "is no function", "Pass one, or a lambda")
            setattr(self, name, hook)
