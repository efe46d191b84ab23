"""Protocol with the attributes and methods of the Trainer that the tuner uses."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self

from torch import nn

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.trainer_view import TrainerView
from roomier.plan import Plan
from roomier.run.options import LoopOptions
from roomier.run.run import Run
from roomier.run.settled import CutBatches


class Tunable(TrainerView, Protocol):
    """Protocol of a Trainer whose next fits use the values that the tuner finds. :class:`roomier.Trainer` implements
    this protocol."""

    @property
    def options(self) -> LoopOptions:
        """Settings of the loop."""

    @property
    def auto_lr_find(self) -> bool | str:
        """True, or the name of an attribute, if a learning rate search runs before a fit."""

    @property
    def auto_scale_batch_size(self) -> bool | str:
        """True, or a mode of :func:`scale_batch_size`, if a micro-batch size search runs before a fit."""

    @property
    def set_path(self) -> Path | str | None:
        """The value that the user assigned to ``ckpt_path``."""

    def join_ranks(self) -> None:
        """Join the other ranks. A trial requires the other ranks before the fit joins them."""

    def use_next(
        self, *, plan: Plan | None = None, micro_batch: int | None = None, num_micro_batches: int | None = None
    ) -> None:
        """In the next fits, use the values that the tuner found. None keeps the current value."""

    def use_learning_rate(self, learning_rate: float | None) -> None:
        """Use ``learning_rate`` for the optimizer that the Trainer creates."""

    def copy_for_trial(self, plan: Plan, options: LoopOptions, callback: Callback) -> Self:
        """Return a copy of this Trainer with ``plan`` and ``options``. The copy writes no files, and
        ``callback`` is its only callback."""

    def session_of_trial(
        self,
        model: nn.Module,
        loaders: dict[str, Any],
        datamodule: DataModule | None,
        weights: str | Path | None,
        cut: CutBatches | None,
    ) -> AbstractContextManager[Run]:
        """Open a fit without additional callbacks, forecasts or files."""
