"""Run: everything one call of fit, validate, test or predict works with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roomier.api.hooks import HookTable
from roomier.api.module import Module
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.ranks import Ranks
from roomier.data.source import Source
from roomier.engine.eager import EagerEngine
from roomier.loggers.group import LoggerGroup
from roomier.plan import Plan
from roomier.train.options import LoopOptions
from roomier.train.progress import Progress
from roomier.train.results import Results
from roomier.train.schedulers import Schedulers
from roomier.train.signals import GracefulStop

if TYPE_CHECKING:
    from roomier.trainer import Trainer

MAX_BATCHES_BEFORE_FIRST_STEP = 1000  # of an epoch whose end does not come


@dataclass
class Run:
    """Made by :mod:`roomier.train.session`, worked through by the loops; plain data and a few questions to it.

    Attributes:
        ranks: what the ranks of the run tell each other; alone where there is one.
        deferred_saves: checkpoints asked for from a hook, written at the next save point.
        is_in_step: between two save points, where the state of a run is not one to resume from.
        is_finishing: the save point that is running is the last one.
        is_interrupted: a signal ended training at a save point; the rest of it is left to the run that goes on.
        saved_step, saved_path: the newest complete checkpoint this run wrote or was resumed from.
        state_at_end: all but the engine's part of a checkpoint, as training left it at its last save point.
        random_state: of a checkpoint, put back when the loop begins.
        last_loss: loss of the last optimizer step (0-dim, on the device).
    """

    trainer: Trainer
    module: Module
    plan: Plan
    options: LoopOptions
    engine: EagerEngine
    hooks: HookTable
    schedulers: Schedulers
    results: Results
    loggers: LoggerGroup
    stop: GracefulStop
    folder: Path | None
    ranks: Ranks = field(default_factory=Ranks)
    progress: Progress = field(default_factory=Progress)
    train_source: Source | None = None
    val_sources: Sequence[Source] = ()
    val_limits: Sequence[float] = ()
    keeps_predictions: bool = True
    num_training_batches: float = 0
    val_interval: float = math.inf
    deferred_saves: list[tuple[Path, bool]] = field(default_factory=list)
    is_in_step: bool = False
    is_finishing: bool = False
    is_interrupted: bool = False
    saved_step: int | None = None
    saved_path: Path | None = None
    state_at_end: dict[str, Any] | None = None
    random_state: dict[str, Any] | None = None
    profiler: torch.profiler.profile | None = None
    last_loss: Tensor | None = None
    started_s: float = field(default_factory=time.monotonic)
    epoch_limit: float = math.inf
    step_limit: float = math.inf

    @property
    def source(self) -> Source:
        """The training data of a fit."""
        assert self.train_source is not None
        return self.train_source

    def is_at_its_end(self) -> bool:
        """Whether there is nothing to do for a fit that begins, or goes on, here."""
        if self.stop.received is not None or self.num_training_batches == 0:
            return True
        return self.progress.is_step_complete and self.is_over()

    def is_over(self) -> bool:
        """Whether training has come to its end at this save point; a signal is another matter."""
        progress, options = self.progress, self.options
        if progress.global_step >= self.step_limit or progress.epoch >= self.epoch_limit:
            return True
        max_time_s = options.max_time_s
        is_asked = self.trainer.should_stop or (
            max_time_s is not None and time.monotonic() - self.started_s >= max_time_s
        )
        has_minimum = progress.epoch >= (options.min_epochs or 0) and progress.global_step >= (options.min_steps or 0)
        return is_asked and has_minimum

    @property
    def num_steps_in_all(self) -> float:
        """Optimizer steps done and still to do if nothing ends the run early; infinite where that is not known."""
        if not self.module.automatic_optimization:
            return math.inf
        size, progress = self.plan.batch.accumulate_grad_batches, self.progress
        num_epochs_left = self.epoch_limit - progress.epoch
        num_left = 0.0
        if num_epochs_left > 0:
            num_left = _ceil((self.num_training_batches - progress.batch_idx) / size)
        if num_epochs_left > 1:
            num_left += (num_epochs_left - 1) * _ceil(self.num_training_batches / size)
        return max(progress.global_step, min(progress.global_step + num_left, self.step_limit))

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Write one row to the loggers at the current step. Here, and only here, values leave their device."""
        row = {name: _number(name, value) for name, value in metrics.items()}
        self.trainer.logged_metrics.update(row)
        if row and self.loggers.loggers:
            self.loggers.log_metrics({"epoch": self.progress.epoch, **row}, self.progress.global_step)

    def check_finite(self, where: str) -> None:
        """Stop before a loss that is no number reaches a log row or a checkpoint.

        A loss scale leaves out the steps of such losses and halves itself each time: below 1 it has done so many times
        in a row, and no scale will help.

        Raises:
            TrainingError: the last loss is not finite, and no loss scale is there to deal with it, or it has given up.
        """
        if self.last_loss is None or bool(torch.isfinite(self.last_loss)):
            return
        if self.engine.scaler is not None and self.engine.scaler.factor >= 1.0:
            return
        raise TrainingError(
            "loss",
            float(self.last_loss),
            f"is not finite at step {self.progress.global_step} ({where}; it is looked at every "
            f"log_every_n_steps={self.options.log_every_n_steps} steps, before each checkpoint and after each epoch)",
            self._way_back(),
        )

    def check_finite_weights(self) -> None:
        """Stop before weights that are no numbers take the place of good ones: a finite loss can ruin them.

        Raises:
            TrainingError: a parameter that is trained holds NaN or infinity.
        """
        for name, parameter in self.engine.module.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point() and parameter.numel():
                extremes = torch.stack(parameter.detach().aminmax())  # unlike isfinite(), needs no second tensor
                if not bool(extremes.isfinite().all()):
                    raise TrainingError(
                        name,
                        float(extremes.sum()),
                        f"this parameter is not finite after step {self.progress.global_step} (before a checkpoint)",
                        self._way_back(),
                    )

    def check_trains(self, *, is_epoch_over: bool = False) -> None:
        """Stop a run that would go on for ever, or come to its end, without having trained anything.

        Raises:
            TrainingError: no batch of the first epoch led to an optimizer step.
        """
        num_batches = self.progress.num_batches
        is_time_to_judge = num_batches > 0 if is_epoch_over else num_batches >= MAX_BATCHES_BEFORE_FIRST_STEP
        if self.progress.global_step or not is_time_to_judge:
            return
        if self.module.automatic_optimization:
            raise TrainingError(
                "training_step",
                None,
                f"returned no loss for any of the first {num_batches} batches, so nothing was trained",
                "Return the loss at its end; None leaves a batch out",
            )
        if math.isinf(self.epoch_limit) and self.options.max_time is None:
            raise TrainingError(
                "training_step",
                type(self.module).__name__,
                f"stepped no optimizer in the first {num_batches} batches, and max_steps counts such steps alone",
                "Call self.optimizers().step() in it (not an optimizer kept elsewhere), or set max_epochs",
            )

    def _way_back(self) -> str:
        advice = "Lower the learning rate, set gradient_clip_val, or find the operation: Trainer(detect_anomaly=True)"
        if self.saved_step is None:
            return f"No checkpoint was written yet. {advice}"
        return f"The checkpoint of step {self.saved_step} is untouched: fit(ckpt_path='last') goes on from it. {advice}"


def _ceil(number: float) -> float:
    return math.ceil(number) if math.isfinite(number) else number


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoomierError("log_metrics", (name, value), "is not a number", "Pass numbers and 0-dim tensors") from error


def call(hooks: Sequence[Callable[..., Any]], *arguments: Any) -> None:
    """Each of ``hooks``, in order."""
    for hook in hooks:
        hook(*arguments)
