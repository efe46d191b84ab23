"""Fake environment in which the code of a run is executed without tensor memory and without other ranks.

[Note: values in a dry run]
Tensors are torch's fake tensors on the CPU. Shapes, dtypes and lifetimes are the same as in the run, but the tensors
have no values. Code that reads a value receives a value that is typical of a training step; see [Note: assumed values].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from roomier.core import torch_fake, torch_private
from roomier.core.device.rng import rng_state, set_rng_state
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.planner.fake.answers import Answers
from roomier.planner.fake.like_cuda import attention_functions, attention_like_cuda, autocast_functions
from roomier.planner.fake.rnn import rnn_kernels
from roomier.planner.fake.user_code import locating_errors

T = TypeVar("T")
_FEW_PARTS = 16  # largest number of chunks of a tensor that are created separately


class FakeRanks(Ranks):
    """Simulated ranks, all of which have the same values as this rank.

    Args:
        world: number of ranks, and the rank that this process represents.
        is_pairwise: True to simulate the pairwise exchange of gloo ranks; False to simulate NCCL collectives.
    """

    def __init__(self, world: World, *, is_pairwise: bool) -> None:
        self.world = world
        self._is_pairwise = is_pairwise

    def exchange_pairwise(self, device: torch.device) -> bool:
        """Return whether ranks use point-to-point communication."""
        return self._is_pairwise

    def sum(self, values: Tensor) -> Tensor:
        """Return ``values`` multiplied by the number of ranks."""
        return values * self.world.size

    def gather(self, value: T, *, allows_pickle: bool = False) -> list[T]:
        """Return ``value`` for each rank."""
        return [value] * self.world.size

    def from_zero(self, value: T, *, allows_pickle: bool = False) -> T:
        """Return ``value``."""
        return value

    def on_zero(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``."""
        return function()

    def barrier(self) -> None:
        """Return immediately."""


@contextmanager
def fake_world(world: World, *, is_pairwise: bool, like: str = "cpu") -> Iterator[FakeRanks]:
    """Return a context in which tensors and process groups are fake and no notices are printed.

    Args:
        world: number of ranks, and the rank that this process represents.
        is_pairwise: True to simulate the pairwise exchange of gloo ranks; False to simulate NCCL collectives.
        like: kind of the device whose kernels determine the memory that is saved for backward. ``"cuda"`` simulates the
            known differences of a GPU; see [Note: like CUDA]. All other kinds use CPU kernels. For kinds other than
            ``"cpu"`` and ``"cuda"``, autocast uses the dtypes of CUDA, and attention saves its scores, because torch
            has no fused attention for many of these devices.

    Raises:
        RoomierError: code inside the context fails. A RoomierError is raised unchanged, and any other error is
            converted to a DryRunError.
    """
    is_cuda = like == "cuda"
    functions: dict[Any, Any] = {} if like == "cpu" else autocast_functions()
    if is_cuda:
        functions |= attention_functions()
    if world.size > _FEW_PARTS:
        functions[torch.chunk] = _chunk
    with ExitStack() as stack:
        stack.enter_context(quiet())
        stack.enter_context(locating_errors())
        stack.enter_context(_generators_as_before())
        stack.enter_context(_masks_of_hugging_face())
        if world.size > 1:
            stack.enter_context(torch_fake.fake_process_group(world.rank, world.size))
        stack.enter_context(torch_fake.fake_tensors())
        stack.enter_context(torch_fake.fake_tensors_on(like))
        stack.enter_context(torch_private.intercept(Answers(is_cuda=is_cuda)))
        stack.enter_context(torch_fake.replaced_kernels(rnn_kernels()))
        if is_cuda:
            stack.enter_context(attention_like_cuda())
        elif like != "cpu":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if functions:  # only if necessary, because the replacement adds a check to each function call
            stack.enter_context(torch_private.replace_functions(functions))
        yield FakeRanks(world, is_pairwise=is_pairwise)


def _chunk(tensor: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Split ``tensor`` in the same way as ``torch.chunk``, but return the same tensor for all chunks of equal size.

    ``fully_shard`` splits each parameter into as many chunks as there are ranks.
    """
    has_gradient = torch.is_grad_enabled() and not tensor.is_leaf  # each chunk then has its own autograd node
    if chunks <= _FEW_PARTS or has_gradient or not tensor.shape[dim]:
        return tensor.chunk(chunks, dim)
    length = tensor.shape[dim]
    size = -(-length // chunks)
    last = (length - 1) // size
    return (*[tensor.narrow(dim, 0, size)] * last, tensor.narrow(dim, last * size, length - last * size))


@contextmanager
def _generators_as_before() -> Iterator[None]:
    """Return a context that restores the state of the random number generators on exit."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def _masks_of_hugging_face() -> Iterator[None]:
    """Return a context in which transformers treats fake tensors as real tensors. For fake tensors, transformers
    creates masks that it omits for real tensors."""
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
