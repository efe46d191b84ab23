"""One name that is logged: its value of a step, and its reduction over an epoch, both left on their device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roomier.run.logged.over_ranks import Told

OF_LOADER = "/dataloader_idx_"


@dataclass(slots=True)
class Entry:
    """One name that was logged, with how it is reduced and who sees it.

    Attributes:
        asked: the arguments of the call that made it; None while it comes from a checkpoint, or from another rank.
        syncs: at a log step, the value is that of all ranks.
        step_weight: of ``value`` among those of other ranks.
        agreed, agreed_step: what all ranks have together, where that was asked; None where something came since.
        updates: of ``metric`` on each rank, when ``agreed`` was computed from it.
        is_double: what was logged has the digits of float64, and so are its figures shown.
        dataloader_idx: of the one loader of an evaluation that it was logged of; None for all of them.
        is_unseen: ``value`` came after everything that :class:`roomier.run.logged.results.Results` shows already.
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
        return self.on_step, self.on_epoch, self.prog_bar, self.logger, self.reduce_fx

    def names_for_step(self) -> tuple[str, ...]:
        return (self.name, self._forked("step")) if self.on_step and self.on_epoch else (self.name,)

    def names_for_epoch(self) -> tuple[str, ...]:
        return (self.name, self._forked("epoch")) if self.on_step and self.on_epoch else (self.name,)

    def _forked(self, what: str) -> str:
        name, mark, number = self.name.partition(OF_LOADER)
        return f"{name}_{what}{mark}{number}"

    @property
    def columns(self) -> set[str]:
        """The names under which loggers see it."""
        of_step = {self.names_for_step()[-1]} if self.on_step else set()
        return of_step | ({self.names_for_epoch()[-1]} if self.on_epoch else set())

    def add(self, value: Any, weight: Any) -> None:
        """Take one value into the epoch's reduction; a value of weight 0 counts for nothing."""
        is_usual = self.reduce_fx == "mean" and isinstance(value, Tensor) and not isinstance(weight, Tensor)
        if is_usual and _is_double(self.total):  # one operation in place of four
            if weight:
                self.total, self.weight = torch.add(self.total, value, alpha=weight), self.weight + weight
            return
        if isinstance(value, Tensor):  # thousands of steps are added up: fp32 would drift, bf16 lose digits at once
            value = value.float() if value.device.type == "mps" else value.double()
        if self.reduce_fx == "mean":
            if isinstance(weight, Tensor):  # asking whether it is 0 would wait for it
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
        """The value of the epoch so far; None where nothing was added."""
        if self.metric is not None:
            return self.metric.compute() if self.metric.update_called else None
        if self.total is None or self.reduce_fx != "mean":
            return self.total
        return self.total / self.weight

    def reset(self) -> None:
        self.total, self.weight, self.agreed, self.updates = None, 0.0, None, None
        if self.metric is not None:
            self.metric.reset()

    def shown(self, value: Any) -> Tensor:
        """``value``, of this entry, as users find it: float32, as what is logged mostly is, or float64."""
        tensor = as_tensor(value)
        if self.metric is not None:
            return tensor  # it is what the metric computed
        return tensor.to(torch.float64 if self.is_double else torch.float32)

    @property
    def step_figure(self) -> Any:
        """The value of the step; that of all ranks where they told it."""
        return self.value if self.agreed_step is None else self.agreed_step

    def told(self) -> Told:
        """What the other ranks need to know of it, as plain numbers: this waits for the device."""
        is_updated = self.metric is not None and self.metric.update_called
        return Told(
            self.options,
            total=None if self.total is None else float(self.total),
            weight=float(self.weight),
            step_value=None if self.value is None or not self.on_step else float(self.value),
            step_weight=float(self.step_weight),
            num_updates=self.metric.update_count if is_updated else 0,
            has_metric=self.metric is not None,
        )


def as_tensor(value: Any) -> Tensor:
    """``value``; a number as float64, for the default dtype may be one of 16 bits in the step of a bf16-true run."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def is_double(value: Any) -> bool:
    """Whether figures of ``value`` are to be shown as float64."""
    if isinstance(value, Tensor):
        return value.dtype == torch.float64
    return torch.get_default_dtype() == torch.float64


def _is_double(total: Any) -> bool:
    return isinstance(total, Tensor) and total.dtype is torch.float64
