"""What the ranks of a run tell each other on the host; with one rank, each call is the identity.

These are for what happens between steps: shares of a batch, agreements, metrics at log steps. Every rank must make
the same calls in the same order. The tensors of a model go other ways (``parallel/``).
"""

import pickle
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.world import World

T = TypeVar("T")


class Ranks:
    """The ranks of a run, over the process group that :mod:`roomier.launch` joined.

    Args:
        world: the place of this process among them. More than one need ``torch.distributed`` to be initialised with
            a backend for the CPU (gloo).
        group: another process group of the same ranks, for calls from another thread; None is the default one.
    """

    def __init__(self, world: World | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.world = world or World()
        self._group = group
        assert self.world.size == 1 or self.world.size == dist.get_world_size()

    @cached_property
    def is_alone(self) -> bool:
        """Whether this rank is the only one."""
        return self.world.size == 1

    def exchange_pairwise(self, device: torch.device) -> bool:
        """Whether the parts of a model on ``device`` go from rank to rank by sends of our own (on gloo)."""
        return device.type == "cpu"

    @property
    def is_zero(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.world.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks of ``values``, of one shape, dtype and kind of device everywhere; a new tensor."""
        if self.is_alone:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self._group)
        return total

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank."""
        return flag if self.is_alone else any(self.gather(flag))

    def gather(self, value: T) -> list[T]:
        """``value`` of each rank, by rank, on every rank."""
        if self.is_alone:
            return [value]
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def from_zero(self, value: T) -> T:
        """``value`` of rank 0 on every rank."""
        if self.is_alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def on_zero(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 alone; what it returns, or raises, comes to every rank. An error that cannot be
        sent comes to the others as a RuntimeError that says the same."""
        if self.is_alone:
            return function()
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.is_zero:
            try:
                outcome = (function(), None)
            except Exception as error:
                self.from_zero((None, _sendable(error)))
                raise
        value, raised = self.from_zero(outcome)
        if raised is not None:
            raise raised
        result: T = value
        return result

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if not self.is_alone:
            dist.barrier(group=self._group)


def _sendable(error: Exception) -> Exception:
    """``error``, if it survives the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # any code may stand in how an error is sent, and made again
        return RuntimeError(f"{type(error).__name__} on rank 0: {error}")
    return error
