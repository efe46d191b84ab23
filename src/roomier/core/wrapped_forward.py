"""Replacements for the ``forward`` method of a module, and their removal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class WrappedForward:
    """Replacement for ``module.forward`` that calls the original method. Subclasses add behavior.

    The replacement is an object instead of a closure, so that ``copy.deepcopy`` of the module also copies the wrapper.
    The copied wrapper calls the ``forward`` method of the copied module.

    Attributes:
        forward: the original ``forward`` method.
        reads_weights_later: True if parameters of the module are also read after its forward pass. These parameters
            must not be freed before the backward pass of the module.
        is_compiled: True if the compiler traces the original ``forward`` method.
    """

    reads_weights_later = False
    is_compiled = False

    def __init__(self, module: nn.Module) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.reads_weights_later |= getattr(module.forward, "reads_weights_later", False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def install(module: nn.Module, wrapped: WrappedForward) -> None:
    """Replace ``module.forward`` with ``wrapped``. Hooks of the module run before and after ``wrapped``."""
    module.forward = wrapped


def has_compiled_forward(module: nn.Module) -> bool:
    """Return whether a :class:`WrappedForward` compiles ``module.forward``."""
    forward: Any = module.forward
    while isinstance(forward, WrappedForward):
        if forward.is_compiled:
            return True
        forward = forward.forward
    return False


def unwrap(module: nn.Module) -> None:
    """Remove every :class:`WrappedForward` from ``module`` and its submodules, and restore the original ``forward``
    methods."""
    for part in module.modules():
        while isinstance(wrapped := part.__dict__.get("forward"), WrappedForward):
            if getattr(wrapped.forward, "__func__", None) is type(part).forward:
                del part.__dict__["forward"]  # the original ``forward`` is the method of the class
            else:
                part.forward = wrapped.forward
