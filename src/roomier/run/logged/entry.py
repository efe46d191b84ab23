"""A logged name, with its value in the current step and its reduction over the epoch. The value and the reduction
remain on the device of the logged value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from roomier.core.device.capability import capabilities_of
from roomier.core.errors import RoomierError

REDUCTIONS = ("mean", "sum", "min", "max")

Key = TypeVar("Key", bound=tuple[Any, ...])
Options = tuple[bool, bool, bool, bool, str]  # on_step, on_epoch, prog_bar, logger, reduce_fx
OPTIONS = ("on_step", "on_epoch", "prog_bar", "logger", "reduce_fx")
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
            changes = zip(OPTIONS, options, each.options, strict=True)
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


OF_LOADER = "/dataloader_idx_"


@dataclass(slots=True)
class Entry:
    """A logged name, with its options, values and reduction.

    Attributes:
        name: the name, including the suffix of the loader, if any.
        on_step, on_epoch, prog_bar, logger, reduce_fx: as in :meth:`roomier.Module.log`.
        value: last value of a step; None if no step logged a value.
        total, weight: reduction over the epoch so far; the mean is ``total / weight``.
        metric: the torchmetrics object that was logged, or None.
        asked: arguments of the call that created this entry; None if the entry comes from a checkpoint or from another
            rank.
        syncs: True if the value is reduced across all ranks at a log step.
        step_weight: weight of ``value`` in the reduction across ranks.
        agreed, agreed_step: values of the epoch and of the step, reduced across all ranks; None if outdated or not
            reduced.
        updates: number of updates of ``metric`` on each rank when ``agreed`` was computed.
        is_double: True if the logged values are float64. In this case, reduced values are shown as float64.
        is_unseen: True if ``value`` is newer than the shown values of :class:`roomier.run.logged.results.Results`.
        dataloader_idx: index of the evaluation loader for which the name was logged; None if the evaluation has only
            one loader, or if the name was logged for several loaders.
    """

    name: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduce_fx: str
    value: Any = None
    total: Any = None
    weight: Any = 0.0
    metric: Any = None
    asked: tuple[Any, ...] | None = None
    syncs: bool = False
    step_weight: Any = 1
    agreed: Any = None
    agreed_step: Any = None
    updates: list[int] | None = None
    is_double: bool = False
    is_unseen: bool = False
    dataloader_idx: int | None = None

    @property
    def options(self) -> tuple[bool, bool, bool, bool, str]:
        """The arguments that must be identical on all ranks."""
        return self.on_step, self.on_epoch, self.prog_bar, self.logger, self.reduce_fx

    def names_for_step(self) -> tuple[str, ...]:
        """Return the column names for the value of a step."""
        return (self.name, self._forked("step")) if self.on_step and self.on_epoch else (self.name,)

    def names_for_epoch(self) -> tuple[str, ...]:
        """Return the column names for the value of an epoch."""
        return (self.name, self._forked("epoch")) if self.on_step and self.on_epoch else (self.name,)

    def _forked(self, suffix: str) -> str:
        name, mark, number = self.name.partition(OF_LOADER)
        return f"{name}_{suffix}{mark}{number}"

    @property
    def columns(self) -> set[str]:
        """Names of the columns that loggers write."""
        of_step = {self.names_for_step()[-1]} if self.on_step else set()
        return of_step | ({self.names_for_epoch()[-1]} if self.on_epoch else set())

    def add(self, value: Any, weight: Any) -> None:
        """Add one value to the reduction of the epoch. A value with weight 0 is ignored."""
        is_usual = self.reduce_fx == "mean" and isinstance(value, Tensor) and not isinstance(weight, Tensor)
        if is_usual and _is_double(self.total):  # one operation instead of four
            if weight:
                self.total, self.weight = torch.add(self.total, value, alpha=weight), self.weight + weight
            return
        if isinstance(value, Tensor):  # sums over thousands of steps lose precision in float32 and bfloat16
            value = value.double() if torch.float64 in capabilities_of(value.device).dtypes else value.float()
        if self.reduce_fx == "mean":
            if isinstance(weight, Tensor):  # a comparison with 0 in Python would wait for the device
                value = torch.where(weight == 0, 0.0, value * weight)
            elif weight == 0:
                return
            else:
                value = value * weight
            self.weight = self.weight + weight
        if self.total is None:
            self.total = value
        elif self.reduce_fx in ("mean", "sum"):
            self.total = self.total + value
        else:
            extreme = torch.minimum if self.reduce_fx == "min" else torch.maximum
            self.total = extreme(as_tensor(self.total), as_tensor(value))

    def reduced(self) -> Any:
        """Return the value of the epoch so far, or None if no value was added."""
        if self.metric is not None:
            return self.metric.compute() if num_updates(self.metric) else None
        if self.total is None or self.reduce_fx != "mean":
            return self.total
        return self.total / self.weight

    def reset(self) -> None:
        """Start a new epoch: clear the reduction and reset the metric."""
        self.total, self.weight, self.agreed, self.updates = None, 0.0, None, None
        if self.metric is not None:
            self.metric.reset()

    def shown(self, value: Any) -> Tensor:
        """Return ``value`` in the dtype that users receive: float64 if the logged values are float64, otherwise
        float32."""
        tensor = as_tensor(value)
        if self.metric is not None:
            return tensor  # a metric determines the dtype of its value
        return tensor.to(torch.float64 if self.is_double else torch.float32)

    @property
    def step_figure(self) -> Any:
        """Value of the step, reduced across all ranks if the ranks exchanged their values."""
        return self.value if self.agreed_step is None else self.agreed_step

    def for_other_ranks(self) -> RankEntry:
        """Return the data that other ranks require for the reduction, as Python numbers. This method waits for the
        device."""
        return RankEntry(
            self.options,
            total=None if self.total is None else float(self.total),
            weight=float(self.weight),
            step_value=None if self.value is None or not self.on_step else float(self.value),
            step_weight=float(self.step_weight),
            num_updates=0 if self.metric is None else num_updates(self.metric),
            has_metric=self.metric is not None,
        )


def num_updates(metric: Any) -> int:
    """Return the number of updates of a torchmetrics object since its last reset. For a metric that is composed of
    other metrics, such as ``a + b``, include the updates of its operands."""
    operands = [getattr(metric, name, None) for name in ("metric_a", "metric_b")]
    return int(metric.update_count) + sum(num_updates(each) for each in operands if hasattr(each, "update_count"))


def as_tensor(value: Any) -> Tensor:
    """Convert ``value`` to a tensor. A number is converted to float64, because with precision bf16-true, the default
    dtype has 16 bits."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def is_double(value: Any) -> bool:
    """Return True if reductions of ``value`` should be shown as float64."""
    if isinstance(value, Tensor):
        return value.dtype == torch.float64
    return torch.get_default_dtype() == torch.float64


def _is_double(total: Any) -> bool:
    return isinstance(total, Tensor) and total.dtype is torch.float64
