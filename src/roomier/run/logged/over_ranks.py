"""Reduction of the values that several ranks logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from roomier.core.errors import RoomierError

REDUCTIONS = ("mean", "sum", "min", "max")

Key = TypeVar("Key", bound=tuple[Any, ...])
Options = tuple[bool, bool, bool, bool, str]  # on_step, on_epoch, prog_bar, logger, reduce_fx
_OPTIONS = ("on_step", "on_epoch", "prog_bar", "logger", "reduce_fx")
_EXTREMES: dict[str, Callable[[Sequence[float]], float]] = {"min": min, "max": max}


class RankEntry(NamedTuple):
    """One logged name on one rank.

    Attributes:
        options: arguments of the call of ``log``.
        total, weight: reduction over the epoch so far; the mean is ``total / weight``. ``total`` is None if no value
            was added.
        step_value, step_weight: last value of a step and its weight. ``step_value`` is None if no step logged a value.
        num_updates: number of updates of a torchmetrics object since its last reset.
        has_metric: True if the value is a torchmetrics object.
    """

    options: Options
    total: float | None
    weight: float
    step_value: float | None
    step_weight: float
    num_updates: int
    has_metric: bool


@dataclass(frozen=True)
class OfAll:
    """One logged name, reduced across all ranks.

    Attributes:
        options: arguments of the call of ``log``.
        total, weight: reduction over the epoch so far.
        step_value: reduced value of the last step, or None.
        updates: number of updates of the torchmetrics object on each rank.
    """

    options: Options
    total: float | None
    weight: float
    step_value: float | None
    updates: list[int]

    @property
    def epoch_value(self) -> float | None:
        """Reduced value of the epoch; None if no rank added a value."""
        if self.total is None or self.options[-1] != "mean":
            return self.total
        return self.total / self.weight if self.weight else math.nan


def reduce_over_ranks(by_rank: Sequence[Mapping[Key, RankEntry]]) -> dict[Key, OfAll]:
    """Return the reduced values of all names that any rank logged. The result and its order are the same on all ranks.

    Args:
        by_rank: logged entries of each rank, by key. The second-to-last item of a key is the name.

    Raises:
        RoomierError: ranks logged a name with different arguments, or only some ranks logged a torchmetrics object.
    """
    keys = dict.fromkeys(key for of_rank in by_rank for key in of_rank)
    return {key: _reduced(str(key[-2]), [of_rank.get(key) for of_rank in by_rank]) for key in keys}


def _reduced(name: str, by_rank: Sequence[RankEntry | None]) -> OfAll:
    there = [each for each in by_rank if each is not None]
    options = there[0].options
    for rank, each in enumerate(by_rank):
        if each is not None and each.options != options:
            changes = zip(_OPTIONS, options, each.options, strict=True)
            problem = ", ".join(
                f"{option}={old!r} and, on rank {rank}, {new!r}" for option, old, new in changes if old != new
            )
            raise RoomierError("log", name, f"is logged with {problem}", "Use the same arguments on all ranks")
    updates = [0 if each is None else each.num_updates for each in by_rank]
    if any(updates) and not all(each is not None and each.has_metric for each in by_rank):
        missing = [rank for rank, each in enumerate(by_rank) if each is None or not each.has_metric]
        raise RoomierError(
            "log",
            name,
            f"must be logged on every rank, because torchmetrics objects compute over all ranks. Ranks {missing} did "
            "not log it",
            "Log it on every rank, or log metric.compute() of one rank as a number",
        )
    fx = options[-1]
    totals = [each.total for each in there if each.total is not None]
    steps = [(each.step_value, each.step_weight) for each in there if each.step_value is not None]
    return OfAll(
        options,
        total=_combined(fx, totals),
        weight=math.fsum(each.weight for each in there),
        step_value=_step_value(fx, steps),
        updates=updates,
    )


def _combined(fx: str, values: Sequence[float]) -> float | None:
    if not values:
        return None
    if fx in _EXTREMES:
        # Unlike min() and max(), return NaN if any value is NaN, so the result does not depend on the number of ranks.
        return math.nan if any(map(math.isnan, values)) else _EXTREMES[fx](values)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _step_value(fx: str, steps: Sequence[tuple[float, float]]) -> float | None:
    if fx != "mean" or not steps:
        return _combined(fx, [value for value, _ in steps])
    weight = math.fsum(weight for _, weight in steps)
    return sum(value * (weight_of / weight) for value, weight_of in steps) if weight else math.nan
