"""What was logged on each rank as one figure."""

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


class Told(NamedTuple):
    """One logged name on one rank.

    Attributes:
        options: how it is logged.
        total, weight: the reduction of the epoch so far; a mean is ``total / weight``. ``total`` is None where nothing
            was added.
        step_value, step_weight: the last value of a step; None where there is none.
        num_updates: of a torchmetrics object since its last reset.
        has_metric: it is a torchmetrics object.
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
    """The same over all ranks.

    Attributes:
        updates: of the torchmetrics object, by rank.
    """

    options: Options
    total: float | None
    weight: float
    step_value: float | None
    updates: list[int]

    @property
    def epoch_value(self) -> float | None:
        if self.total is None or self.options[-1] != "mean":
            return self.total
        return self.total / self.weight if self.weight else math.nan


def reduce_over_ranks(by_rank: Sequence[Mapping[Key, Told]]) -> dict[Key, OfAll]:
    """The figures of all names that any rank logged; the same dict, in the same order, on all of them.

    Args:
        by_rank: what each rank logged; the last but one part of a key is the name.

    Raises:
        RoomierError: ranks log a name differently, or a torchmetrics object, which they compute together, on some only.
    """
    keys = dict.fromkeys(key for of_rank in by_rank for key in of_rank)
    return {key: _reduced(str(key[-2]), [of_rank.get(key) for of_rank in by_rank]) for key in keys}


def _reduced(name: str, by_rank: Sequence[Told | None]) -> OfAll:
    there = [told for told in by_rank if told is not None]
    options = there[0].options
    for rank, told in enumerate(by_rank):
        if told is not None and told.options != options:
            changes = zip(_OPTIONS, options, told.options, strict=True)
            problem = ", ".join(
                f"{what}={old!r} and, on rank {rank}, {new!r}" for what, old, new in changes if old != new
            )
            raise RoomierError("log", name, f"is logged with {problem}", "Use the same arguments on all ranks")
    updates = [0 if told is None else told.num_updates for told in by_rank]
    if any(updates) and not all(told is not None and told.has_metric for told in by_rank):
        missing = [rank for rank, told in enumerate(by_rank) if told is None or not told.has_metric]
        raise RoomierError(
            "log",
            name,
            f"is a torchmetrics object that ranks {missing} did not log; its ranks compute it together",
            "Log it on every rank, or log metric.compute() of one rank as a number",
        )
    fx = options[-1]
    totals = [told.total for told in there if told.total is not None]
    steps = [(told.step_value, told.step_weight) for told in there if told.step_value is not None]
    return OfAll(
        options,
        total=_combined(fx, totals),
        weight=math.fsum(told.weight for told in there),
        step_value=_step_value(fx, steps),
        updates=updates,
    )


def _combined(fx: str, values: Sequence[float]) -> float | None:
    if not values:
        return None
    if fx in _EXTREMES:
        # Unlike min() and max(), NaN anywhere is NaN, as on one rank.
        return math.nan if any(map(math.isnan, values)) else _EXTREMES[fx](values)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _step_value(fx: str, steps: Sequence[tuple[float, float]]) -> float | None:
    if fx != "mean" or not steps:
        return _combined(fx, [value for value, _ in steps])
    weight = math.fsum(weight for _, weight in steps)
    return sum(value * (weight_of / weight) for value, weight_of in steps) if weight else math.nan
