"""The global batch, and the number of micro-batches per optimizer step. If a callback sets a factor for the epoch, the
number in the Plan is multiplied by this factor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from roomier.core.errors import RoomierError
from roomier.plan import Plan


@runtime_checkable
class SchedulesAccumulation(Protocol):
    """A callback that sets the gradient accumulation for each epoch."""

    epochs: list[int]
    """The epochs in which the accumulation changes, in ascending order, starting with 0."""

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the factor for ``epoch``."""


@dataclass(frozen=True)
class Accumulation:
    """Number of micro-batches per optimizer step and rank.

    Args:
        size: the number of micro-batches in the plan.
        schedule: a callback that multiplies ``size`` by a factor that depends on the epoch; None if there is no such
            callback.
    """

    size: int
    schedule: SchedulesAccumulation | None = None

    @staticmethod
    def of(plan: Plan, callbacks: Iterable[object]) -> Accumulation:
        """Return the accumulation that ``plan`` and the first scheduling callback in ``callbacks`` specify."""
        schedule = next((each for each in callbacks if isinstance(each, SchedulesAccumulation)), None)
        return Accumulation(plan.batch.accumulate_grad_batches, schedule)

    def at(self, epoch: int) -> int:
        """Return the number of micro-batches per optimizer step in ``epoch``."""
        return self.size if self.schedule is None else self.size * self.schedule.get_accumulate_grad_batches(epoch)

    def num_steps(self, first: float, end: float, num_batches: float) -> float:
        """Return the number of optimizer steps in the epochs from ``first`` to ``end``, each of which has
        ``num_batches`` batches.

        The epoch ``end`` is not included.
        """
        if end <= first or not num_batches:
            return 0
        if math.isinf(num_batches) or math.isinf(end):
            return math.inf
        changes = [] if self.schedule is None else [epoch for epoch in self.schedule.epochs if first < epoch < end]
        bounds = [int(first), *changes, int(end)]
        return sum((after - before) * math.ceil(num_batches / self.at(before)) for before, after in pairwise(bounds))


@dataclass(frozen=True)
class GlobalBatch:
    """The batch of one optimizer step over all ranks.

    Args:
        batch_size: number of samples per micro-batch; None if the loader determines this number and roomier cannot
            change it.
        accumulate: number of micro-batches per step on each rank.
        num_ranks: number of data ranks, each of which processes separate micro-batches.
    """

    batch_size: int | None
    accumulate: int
    num_ranks: int

    @property
    def size(self) -> int:
        """Number of samples per step, or number of micro-batches if the size of a micro-batch is unknown."""
        return (self.batch_size or 1) * self.accumulate * self.num_ranks

    def on(self, num_ranks: int, batch_size: int | None) -> GlobalBatch:
        """Return the same global batch, divided among ``num_ranks`` ranks.

        Micro-batches retain their size if a different accumulation compensates for the new number of ranks. Otherwise,
        the size of the micro-batches is reduced by as little as possible, so the micro-batches still fit in memory.

        Args:
            num_ranks: new number of ranks.
            batch_size: current batch size of the loader.

        Raises:
            RoomierError: the batch cannot be divided among ``num_ranks`` ranks. The error message lists the valid
                numbers of ranks.
        """
        if self.batch_size is None or batch_size is None:
            whole = GlobalBatch(None, self.accumulate, self.num_ranks).size
            if whole % num_ranks:
                raise _indivisible(num_ranks, whole, "micro-batches")
            return GlobalBatch(None, whole // num_ranks, num_ranks)
        if self.size % num_ranks:
            raise _indivisible(num_ranks, self.size, "samples")
        of_rank = self.size // num_ranks
        fitting = next(size for size in range(min(batch_size, of_rank), 0, -1) if of_rank % size == 0)
        return GlobalBatch(fitting, of_rank // fitting, num_ranks)

    def __str__(self) -> str:
        samples = "" if self.batch_size is None else f" x {self.batch_size} samples"
        return f"{self.num_ranks} ranks x {self.accumulate} micro-batches{samples}"


def _indivisible(num_ranks: int, size: int, unit: str) -> RoomierError:
    working = [number for number in range(1, 2 * num_ranks + 1) if size % number == 0]
    action = f"Restart with one of these numbers of ranks: {', '.join(map(str, working))}"
    return RoomierError("devices", num_ranks, f"must be a divisor of {size}, the number of {unit} in a step", action)
