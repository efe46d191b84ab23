"""How many micro-batches a step takes: what the Plan says, times what a callback says for the epoch."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from roomier.trainer import Trainer


@runtime_checkable
class SchedulesAccumulation(Protocol):
    """A callback that accumulates gradients by epoch."""

    epochs: list[int]
    """Those in which the number changes, rising, from 0."""

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Micro-batches of a step in ``epoch``."""
        ...


def accumulation_at(trainer: Trainer, epoch: int) -> int:
    """Micro-batches of one optimizer step in ``epoch``, on each rank."""
    size = trainer.plan.batch.accumulate_grad_batches
    schedule = _schedule_of(trainer)
    return size if schedule is None else size * schedule.get_accumulate_grad_batches(epoch)


def num_steps_between(trainer: Trainer, first: float, end: float, num_batches: float) -> float:
    """Optimizer steps of the epochs from ``first`` up to ``end``, of ``num_batches`` each; infinite where one is."""
    if end <= first or not num_batches:
        return 0
    if math.isinf(num_batches) or math.isinf(end):
        return math.inf
    schedule = _schedule_of(trainer)
    changes = [] if schedule is None else [epoch for epoch in schedule.epochs if first < epoch < end]
    bounds = [int(first), *changes, int(end)]
    return sum(
        (after - before) * math.ceil(num_batches / accumulation_at(trainer, before))
        for before, after in pairwise(bounds)
    )


def _schedule_of(trainer: Trainer) -> SchedulesAccumulation | None:
    return next((each for each in trainer.callbacks if isinstance(each, SchedulesAccumulation)), None)
