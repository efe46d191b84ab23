"""A world in which tensors have no memory and other ranks do not exist, for the code of a run to be run in.

[Note: what the fake world cannot tell]
Tensors are torch's fake ones, on the CPU: shapes, dtypes and lifetimes are those of the run, values are not there.
Where code asks for a value, the answer is what an ordinary step has: a flag is true, a count is 1, nothing is infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from roomier.core import torch_private
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.core.world import World

T = TypeVar("T")


class FakeRanks(Ranks):
    """Ranks that say and do what this one does.

    Args:
        world: its place among them.
        is_pairwise: they are on gloo; else on NCCL.
    """

    def __init__(self, world: World, *, is_pairwise: bool) -> None:
        self.world = world
        self._is_pairwise = is_pairwise

    def exchange_pairwise(self, device: torch.device) -> bool:
        return self._is_pairwise

    def sum(self, values: Tensor) -> Tensor:
        return values * self.world.size

    def gather(self, value: T) -> list[T]:
        return [value] * self.world.size

    def from_zero(self, value: T) -> T:
        return value

    def on_zero(self, function: Callable[[], T]) -> T:
        return function()

    def barrier(self) -> None:
        """They are all here."""


@contextmanager
def fake_world(world: World, *, is_pairwise: bool) -> Iterator[FakeRanks]:
    """Inside, tensors are fake, process groups too, and notices are not printed.

    Args:
        world: how many ranks there are, and which of them this is.
        is_pairwise: they exchange the parts of a model as on gloo; else as on NCCL.
    """
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if world.size > 1:
            stack.enter_context(torch_private.fake_process_group(world.rank, world.size))
        stack.enter_context(torch_private.fake_tensors())
        stack.enter_context(torch_private.intercept(_Answers()))
        yield FakeRanks(world, is_pairwise=is_pairwise)


class _Answers:
    """Answers what fake tensors cannot; see [Note: what the fake world cannot tell]."""

    def __init__(self) -> None:
        self._zeros: list[Tensor] = []

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch_private.READS_VALUE and torch_private.fake_constant(args[0]) is None:
            return self._value(args[0])
        if func is torch.ops.aten.equal.default:
            return True
        if func is torch_private.UNSCALES:
            self._zeros.append(args[1])
        return func(*args, **kwargs)

    def _value(self, tensor: Tensor) -> bool | int | float:
        if any(each is tensor for each in self._zeros):
            return 0.0
        return True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
