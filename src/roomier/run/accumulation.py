"""Number of micro-batches per optimizer step. If a callback sets a factor for the epoch, the number in the Plan is
multiplied by this factor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from roomier.plan import Plan


@runtime_checkable
class SchedulesAccumulation(Protocol):
    """A callback that sets the gradient accumulation for each epoch."""

    epochs: list[int]
    """The epochs in which the accumulation changes, in ascending order, starting with 0."""

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the factor for ``epoch``."""
        ...


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
