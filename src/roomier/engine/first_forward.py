"""Contexts of forward passes, with additional contexts around the first forward pass of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

MakeContext = Callable[[], AbstractContextManager[Any]]
"""Function that creates a context."""


class FirstForward:
    """Factory that creates the context of each forward pass with ``make``, and enters ``watches`` around the first
    forward pass that computes gradients.

    Attributes:
        make: function that creates the context of a forward pass.
        watches: contexts that are entered once, around the next forward pass with gradients.
    """

    def __init__(self, make: MakeContext) -> None:
        self.make = make
        self.watches: list[AbstractContextManager[Any]] = []

    def __call__(self) -> AbstractContextManager[Any]:
        if self.watches and torch.is_grad_enabled():
            return self._watched()
        return self.make()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        watches, self.watches = self.watches, []
        with ExitStack() as stack:
            for each in watches:
                stack.enter_context(each)
            stack.enter_context(self.make())
            yield


def both(outer: MakeContext, inner: MakeContext) -> MakeContext:
    """Return a function that enters the context of ``inner`` inside the context of ``outer``."""

    @contextmanager
    def make() -> Iterator[None]:
        with outer(), inner():
            yield

    return make
