"""Members of an Accelerator for its processes: their numbers, functions that run on some processes, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

from roomier.core.ranks import Ranks
from roomier.prepared.tensors import padded, part_of_rank, reduced

Function = Callable[..., Any]


class Processes:
    """Members of an Accelerator that depend only on its ranks.

    Attributes:
        ranks: all ranks.
        device: device of this rank.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.device = device
        self._is_triggered = False

    @property
    def num_processes(self) -> int:
        """Number of ranks."""
        return self.ranks.world.size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self.ranks.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self.ranks.world.local_rank

    @property
    def use_distributed(self) -> bool:
        """True if there are several ranks."""
        return not self.ranks.is_alone

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on the first rank of each machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank."""
        return self.process_index == self.num_processes - 1

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate ``function`` to run on rank 0 only. Other ranks return None."""
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate ``function`` to run on the first rank of each machine only."""
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate ``function`` to run on the last rank only."""
        return self._only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorate ``function`` to run on the rank ``process_index`` only."""
        return self._only(lambda: self.process_index == process_index, function)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorate ``function`` to run on the rank ``local_process_index`` of each machine only."""
        return self._only(lambda: self.local_process_index == local_process_index, function)

    def _only(self, is_here: Callable[[], bool], function: Function | None) -> Function:
        if function is None:
            return partial(self._only, is_here)

        @wraps(function)
        def on_some(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_here() else None

        return on_some

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Return a context that the other ranks enter only after rank 0 has left it."""
        yield from self._first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Return a context that the other ranks enter only after the first rank of each machine has left it."""
        yield from self._first(self.is_local_main_process)

    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def wait_for_everyone(self) -> None:
        """Wait until every rank calls this method."""
        self.ranks.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first rank of each machine only."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def set_trigger(self) -> None:
        """Make the next call to :meth:`check_trigger` return True on all ranks."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank called :meth:`set_trigger`, and clear the request. Every rank must call this
        method."""
        found, self._is_triggered = self.ranks.any(self._is_triggered), False
        return found

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return ``tensor`` (nested tensors) reduced over the ranks.

        Args:
            tensor: tensors of the same shapes on every rank.
            reduction: ``"sum"``, ``"mean"``, ``"max"``, or ``"none"``, which also sums, as in Accelerate.
            scale: this argument has no effect, as in Accelerate on all devices except XLA.

        Raises:
            RoomierError: ``reduction`` is unknown.
        """
        return reduced(tensor, reduction, self.ranks)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return ``tensor`` (nested tensors), with each tensor padded along ``dim`` to its largest size over the ranks.

        Args:
            tensor: tensors whose sizes can differ along ``dim``.
            dim: dimension to pad.
            pad_index: value of the added elements.
            pad_first: if True, add elements at the start instead of the end.
        """
        return padded(tensor, dim, pad_index, first=pad_first, ranks=self.ranks)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Return a context whose value is the part of ``inputs`` for this rank.

        Args:
            inputs: a list, tuple or tensor, or a dict of values with the same number of elements.
            apply_padding: if True, repeat the last element, so that all ranks receive the same number of elements.

        Raises:
            RoomierError: the values of a dict have different lengths.
        """
        yield part_of_rank(inputs, self.ranks, pads=apply_padding)
