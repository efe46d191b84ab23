"""A forward in the place of a module's own, and back again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class WrappedForward:
    """Stands in the place of ``module.forward`` and calls it in its own way; subclasses say how.

    An object and not a closure: a copy of the module (``copy.deepcopy``, as an averaging callback makes) has a copy of
    this, whose ``forward`` is that of the copied module.

    Attributes:
        forward: what was in its place.
        reads_weights_later: whether parameters of the module are read after its forward, too, and must not be freed
            before its backward.
    """

    reads_weights_later = False

    def __init__(self, module: nn.Module) -> None:
        self.forward: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def install(module: nn.Module, wrapped: WrappedForward) -> None:
    """Let ``module`` run ``wrapped`` in the place of its forward; its hooks stay outside of it."""
    module.forward = wrapped


def unwrap(module: nn.Module) -> None:
    """Give ``module`` and its parts the forward back that they had before any :class:`WrappedForward`."""
    for part in module.modules():
        while isinstance(wrapped := part.__dict__.get("forward"), WrappedForward):
            if getattr(wrapped.forward, "__func__", None) is type(part).forward:
                del part.__dict__["forward"]  # it was the method of its class
            else:
                part.forward = wrapped.forward
