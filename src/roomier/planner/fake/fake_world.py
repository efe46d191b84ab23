"""A world in which tensors have no memory and other ranks do not exist, for the code of a run to be run in.

[Note: what the fake world cannot tell]
Tensors are torch's fake ones, on the CPU: shapes, dtypes and lifetimes are those of the run, values are not there.
Where code asks for a value, the answer is what an ordinary step has: see [Note: made-up values].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from roomier.core import torch_fake, torch_private
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.core.rng import rng_state, set_rng_state
from roomier.core.world import World
from roomier.planner.fake.answers import Answers
from roomier.planner.fake.like_cuda import attention_like_cuda, functions_like_cuda
from roomier.planner.fake.rnn import rnn_kernels
from roomier.planner.fake.user_code import told_where

T = TypeVar("T")
_FEW_PARTS = 16  # of a tensor that is cut: each of them is made


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

    def gather(self, value: T, *, allows_pickle: bool = False) -> list[T]:
        return [value] * self.world.size

    def from_zero(self, value: T, *, allows_pickle: bool = False) -> T:
        return value

    def on_zero(self, function: Callable[[], T]) -> T:
        return function()

    def barrier(self) -> None:
        """They are all here."""


@contextmanager
def fake_world(world: World, *, is_pairwise: bool, like: str = "cpu") -> Iterator[FakeRanks]:
    """Inside, tensors are fake, process groups too, and notices are not printed.

    Args:
        world: how many ranks there are, and which of them this is.
        is_pairwise: they exchange the parts of a model as on gloo; else as on NCCL.
        like: ``"cpu"``, or ``"cuda"`` for what is known to differ there: see [Note: like CUDA].

    Raises:
        RoomierError: of those inside as they are; any other error as a DryRunError.
    """
    is_cuda = like == "cuda"
    functions: dict[Any, Any] = functions_like_cuda() if is_cuda else {}
    if world.size > _FEW_PARTS:
        functions[torch.chunk] = _chunk
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(told_where())
        stack.enter_context(_generators_as_before())
        stack.enter_context(_values_asked_for())
        if world.size > 1:
            stack.enter_context(torch_fake.fake_process_group(world.rank, world.size))
        stack.enter_context(torch_fake.fake_tensors())
        stack.enter_context(torch_fake.fake_tensors_in_groups(as_on_cuda=is_cuda))
        stack.enter_context(torch_private.intercept(Answers(is_cuda=is_cuda)))
        stack.enter_context(torch_fake.replaced_kernels(rnn_kernels()))
        if is_cuda:
            stack.enter_context(attention_like_cuda())
        if functions:  # it is asked of every function
            stack.enter_context(torch_private.replace_functions(functions))
        yield FakeRanks(world, is_pairwise=is_pairwise)


def _chunk(tensor: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """``torch.chunk``. ``fully_shard`` cuts each parameter into as many parts as there are ranks: equal ones are made
    once."""
    has_gradient = torch.is_grad_enabled() and not tensor.is_leaf  # where each part has its own
    if chunks <= _FEW_PARTS or has_gradient or not tensor.shape[dim]:
        return tensor.chunk(chunks, dim)
    length = tensor.shape[dim]
    size = -(-length // chunks)
    last = (length - 1) // size
    return (*[tensor.narrow(dim, 0, size)] * last, tensor.narrow(dim, last * size, length - last * size))


@contextmanager
def _generators_as_before() -> Iterator[None]:
    """What is drawn inside changes nothing outside."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def _values_asked_for() -> Iterator[None]:
    """Inside, code of Hugging Face asks tensors for values as in a run: to fake ones it gives masks that it would leave
    out."""
    found: Any = sys.modules.get("transformers.utils.import_utils")
    name = "is_fake_tensor"
    before = getattr(found, name, None)
    if before is None:
        yield
        return
    setattr(found, name, lambda tensor: False)
    try:
        yield
    finally:
        setattr(found, name, before)
