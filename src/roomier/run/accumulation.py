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
        num_in_round: number of samples in a micro-batch of all ranks; None if it is a multiple of ``num_ranks``.
            Otherwise, some ranks have one sample less than ``batch_size``.
    """

    batch_size: int | None
    accumulate: int
    num_ranks: int
    num_in_round: int | None = None

    @property
    def size(self) -> int:
        """Number of samples per step, or number of micro-batches if the size of a micro-batch is unknown."""
        return self.accumulate * (self.num_in_round or (self.batch_size or 1) * self.num_ranks)

    def on(self, num_ranks: int, batch_size: int | None) -> GlobalBatch:
        """Return the same global batch, divided among ``num_ranks`` ranks.

        Micro-batches retain their size if a different accumulation compensates for the new number of ranks. Otherwise,
        the size of the micro-batches is reduced by as little as possible, so the micro-batches still fit in memory. If
        the number of samples is not divisible by the number of ranks, some ranks have one sample less than others.

        Args:
            num_ranks: new number of ranks.
            batch_size: current batch size of the loader.

        Raises:
            RoomierError: the batch cannot be divided among ``num_ranks`` ranks, each of which requires a sample. The
                error message lists the valid numbers of ranks.
        """
        if self.batch_size is None or batch_size is None:
            whole = GlobalBatch(None, self.accumulate, self.num_ranks).size
            if whole % num_ranks:
                raise _indivisible(num_ranks, whole, "micro-batches")
            return GlobalBatch(None, whole // num_ranks, num_ranks)
        largest = min(batch_size * num_ranks, self.size)
        rounds = [each for each in range(largest, num_ranks - 1, -1) if self.size % each == 0]
        even = [each for each in rounds if each % num_ranks == 0]
        if not rounds:
            raise _indivisible(num_ranks, self.size, "samples")
        num_in_round = (even or rounds)[0]
        batch_size = math.ceil(num_in_round / num_ranks)
        return GlobalBatch(batch_size, self.size // num_in_round, num_ranks, None if even else num_in_round)

    def __str__(self) -> str:
        samples = "" if self.batch_size is None else f" x {self.batch_size} samples"
        if self.batch_size is not None and self.num_in_round is not None:
            samples = f" x {self.batch_size - 1} to {self.batch_size} samples"
        return f"{self.num_ranks} ranks x {self.accumulate} micro-batches{samples}"


def _indivisible(num_ranks: int, size: int, unit: str) -> RoomierError:
    working = [number for number in range(1, 2 * num_ranks + 1) if size % number == 0]
    action = f"Restart with one of these numbers of ranks: {', '.join(map(str, working))}"
    return RoomierError("devices", num_ranks, f"these ranks cannot share the {size} {unit} of a step", action)
