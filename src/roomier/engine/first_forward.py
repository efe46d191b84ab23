"""The first forward of training, in which what cannot be known before is looked at; all others cost nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

MakeContext = Callable[[], AbstractContextManager[Any]]


class FirstForward:
    """Makes the context a step runs in: each time that of ``make``, and the first time with gradients ``watches`` too.

    Attributes:
        watches: entered once, around that forward; what is added later waits for the next.
    """

    def __init__(self, make: MakeContext) -> None:
        self._make = make
        self.watches: list[AbstractContextManager[Any]] = []

    def __call__(self) -> AbstractContextManager[Any]:
        if self.watches and torch.is_grad_enabled():
            return self._watched()
        return self._make()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        watches, self.watches = self.watches, []
        with ExitStack() as stack:
            for each in watches:
                stack.enter_context(each)
            stack.enter_context(self._make())
            yield


def both(outer: MakeContext, inner: MakeContext) -> MakeContext:
    """What makes the context of one in that of the other."""

    @contextmanager
    def make() -> Iterator[None]:
        with outer(), inner():
            yield

    return make
