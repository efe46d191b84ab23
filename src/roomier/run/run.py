"""Run: everything one call of fit, validate, test or predict works with."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roomier.api.engine import Engine
from roomier.api.hooks import HookTable
from roomier.api.lightning import LightningAdapter
from roomier.api.module import Module
from roomier.checkpoint import BackgroundSaver
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.ranks import Ranks
from roomier.core.vote import Vote
from roomier.data.source import Source
from roomier.loggers.group import LoggerGroup
from roomier.plan import Plan
from roomier.run.accumulation import accumulation_at, num_steps_between
from roomier.run.logged.results import Results
from roomier.run.options import LoopOptions
from roomier.run.progress import Progress
from roomier.run.schedulers import Schedulers
from roomier.run.signals import GracefulStop

if TYPE_CHECKING:
    from roomier.trainer import Trainer

MAX_BATCHES_BEFORE_FIRST_STEP = 1000  # of an epoch whose end does not come


@dataclass(frozen=True)
class WantedSave:
    """A checkpoint that was asked for; the arguments are those of :func:`roomier.train.saving.save.save_checkpoint`."""

    path: Path
    weights_only: bool = False
    asynchronous: bool = False
    when_committed: Callable[[], None] | None = None


@dataclass
class Run:
    """Made by :mod:`roomier.train.opening.open_run`, worked through by the loops; plain data and a few questions to it.

    Attributes:
        ranks: what the ranks of the run tell each other; alone where there is one.
        deferred_saves: checkpoints asked for from a hook, written at the next save point.
        not_stored: entries of a LightningModule's checkpoint that were said to be left out.
        background: writes checkpoints beside the training; made by the first that is asked for.
        when_settled: what is due when the one it is writing is committed.
        is_in_step: between two save points, where the state of a run is not one to resume from.
        is_finishing: the save point that is running is the last one.
        is_interrupted: a signal ended training at a save point; the rest of it is left to the run that goes on.
        saved_step, saved_path: the newest complete checkpoint this run wrote or was resumed from.
        state_at_end: all but the engine's part of a checkpoint, as training left it at its last save point.
        random_state: of a checkpoint, put back when the loop begins.
        batch_idx: of the training batch at hand in its epoch, counting micro-batches.
        batch_number: of the batch that is evaluated, among those of all ranks; each rank counts its own by itself, and
            steps and hooks get that count as their ``batch_idx``.
        last_loss: loss of the last optimizer step (0-dim, on the device); on several ranks, this rank's share of it.
        leaves_out_step: a hook before an update asked that it is not done; the step counts for nothing.
        looks: called, on every rank, before a loss that is not finite would end the run.
        is_stop_agreed: on several ranks, all know that one of them wants training to end.
        num_saves_ended: how many checkpoints that were written beside the training all know to have come to their end.
    """

    trainer: Trainer
    module: Module
    plan: Plan
    options: LoopOptions
    engine: Engine
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
    batch_idx: int = -1
    batch_number: int = -1
    val_interval: float = math.inf
    deferred_saves: list[WantedSave] = field(default_factory=list)
    not_stored: set[str] = field(default_factory=set)
    background: BackgroundSaver | None = None
    when_settled: Callable[[], None] | None = None
    is_in_step: bool = False
    is_finishing: bool = False
    is_interrupted: bool = False
    saved_step: int | None = None
    saved_path: Path | None = None
    state_at_end: dict[str, Any] | None = None
    random_state: dict[str, Any] | None = None
    profiler: torch.profiler.profile | None = None
    last_loss: Tensor | None = None
    leaves_out_step: bool = False
    looks: list[Callable[[], None]] = field(default_factory=list)
    is_stop_agreed: bool = False
    num_saves_ended: int = 0
    started_s: float = field(default_factory=time.monotonic)
    epoch_limit: float = math.inf
    step_limit: float = math.inf

    def __post_init__(self) -> None:
        self._vote = Vote(self.ranks)

    @property
    def source(self) -> Source:
        """The training data of a fit."""
        assert self.train_source is not None
        return self.train_source

    @property
    def counts_empty_steps(self) -> bool:
        """Whether a step for which ``training_step`` gave no loss counts: for optimizers and schedulers of a
        LightningModule it does."""
        return self.module.automatic_optimization and isinstance(self.module, LightningAdapter)

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
        is_asked = self._wants_to_stop() if self.ranks.is_alone else self.is_stop_agreed
        has_minimum = progress.epoch >= (options.min_epochs or 0) and progress.global_step >= (options.min_steps or 0)
        return is_asked and has_minimum

    def _wants_to_stop(self) -> bool:
        max_time_s = self.options.max_time_s
        return self.trainer.should_stop or (max_time_s is not None and time.monotonic() - self.started_s >= max_time_s)

    def vote(self, *, waits: bool = False) -> None:
        """Let all ranks obey a signal, or end training, at the same place: every rank must call it there.

        See [Note: ranks end together] in ``docs/design/train.md``.

        Args:
            waits: for the other ranks: what one of them wants now holds now. Else it holds at the next vote.

        Raises:
            TrainingError: the ranks did not run the same parts of a model that is cut among them.
        """
        if self.ranks.is_alone:
            return
        num_ended = 0 if self.background is None else self.background.num_ended
        wishes = [int(self.stop.noted or 0), int(self._wants_to_stop()), -num_ended]
        outcome = (self._vote.settle if waits else self._vote.cast)(wishes, self.engine.trace)
        if self._vote.is_split:
            raise self._ran_other_parts()
        if outcome is None:
            return
        number, wants_to_stop, least_ended = outcome
        self.num_saves_ended = -least_ended
        self.is_stop_agreed = bool(wants_to_stop)
        if number:
            self.stop.received = signal.Signals(number)

    def _ran_other_parts(self) -> TrainingError:
        step = self.progress.global_step
        return TrainingError(
            "strategy",
            self.plan.parallel.strategy,
            f"the ranks ran different parts of the model in step {step} or the one before, or in another order: "
            "what was gathered for one part was taken for another",
            "Let all ranks run the same parts, or use strategy={'name': 'ddp', 'find_unused_parameters': True}; "
            "go on from a checkpoint of an earlier step",
        )

    def is_background_save_over(self) -> bool:
        """Whether the checkpoint that is written beside the training has come to its end, as far as all ranks know."""
        if self.background is None or not self.background.is_busy:
            return False
        num_ended = self.background.num_ended if self.ranks.is_alone else self.num_saves_ended
        return num_ended == self.background.num_started

    @property
    def num_steps_in_all(self) -> float:
        """Optimizer steps done and still to do if nothing ends the run early; infinite where that is not known."""
        if not self.module.automatic_optimization:
            return math.inf
        progress, num_left = self.progress, 0.0
        if self.epoch_limit > progress.epoch:
            num_batches_left = self.num_training_batches - progress.batch_idx
            num_left = _ceil(num_batches_left / accumulation_at(self.trainer, progress.epoch))
            num_left += num_steps_between(self.trainer, progress.epoch + 1, self.epoch_limit, self.num_training_batches)
        return max(progress.global_step, min(progress.global_step + num_left, self.step_limit))

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Write one row to the loggers at the current step. Here, and only here, values leave their device."""
        row = {name: _number(name, value) for name, value in metrics.items()}
        if row and self.loggers.loggers:
            self.loggers.log_metrics({"epoch": self.progress.epoch, **row}, self.progress.global_step)

    def loss_number(self) -> float | None:
        """:attr:`last_loss` as a number; waits for the device."""
        return None if self.last_loss is None else float(self.last_loss)

    def loss_of_all(self, losses: Sequence[float | None]) -> float | None:
        """The loss of the last step over all ranks, from that of each: shares of a batch are added up, losses of steps
        that the module takes by itself are averaged."""
        there = [loss for loss in losses if loss is not None]
        if not there:
            return None
        return sum(there) if self.module.automatic_optimization else sum(there) / len(there)

    def check_finite(self, where: str, losses: Sequence[float | None] | None = None) -> None:
        """Stop before a loss that is no number reaches a log row or a checkpoint. Every rank must call it.

        A loss scale leaves out the steps of such losses and halves itself each time: below 1 it has done so many times
        in a row, and no scale will help.

        Args:
            losses: of the last step on each rank, where they are known.

        Raises:
            TrainingError: the last loss is not finite on a rank, and no loss scale is there to deal with it, or it has
                given up.
        """
        for look in self.looks:
            look()
        if self.ranks.is_alone:
            if self.last_loss is None or bool(torch.isfinite(self.last_loss)):
                return
        elif losses is None:
            losses = self.ranks.gather(self.loss_number())
        if self.engine.scaler.is_on and self.engine.scaler.factor >= 1.0:
            return
        for rank, loss in enumerate(losses or [self.loss_number()]):
            if loss is None or math.isfinite(loss):
                continue
            on_rank = "" if self.ranks.is_alone else f" on rank {rank}"
            raise TrainingError(
                "loss",
                loss,
                f"is not finite{on_rank} at step {self.progress.global_step} ({where}; it is looked at every "
                f"log_every_n_steps={self.options.log_every_n_steps} steps, before each checkpoint and after each "
                "epoch)",
                self._way_back(),
            )

    def check_finite_weights(self) -> None:
        """Stop before weights that are no numbers take the place of good ones: a finite loss can ruin them. Every rank
        must call it; each looks at its part.

        Raises:
            TrainingError: a parameter that is trained holds NaN or infinity.
        """
        for rank, found in enumerate(self.ranks.gather(self._not_finite())):
            if found is not None:
                name, value = found
                on_rank = "" if self.ranks.is_alone else f" on rank {rank}"
                raise TrainingError(
                    name,
                    value,
                    f"this parameter is not finite{on_rank} after step {self.progress.global_step} (before a "
                    "checkpoint)",
                    self._way_back(),
                )

    def _not_finite(self) -> tuple[str, float] | None:
        """The name of a parameter that holds NaN or infinity here, and one of them."""
        for name, parameter in self.engine.module.named_parameters():
            if not (parameter.requires_grad and parameter.is_floating_point()):
                continue
            own = parameter.detach()
            to_local = getattr(own, "to_local", None)  # of a parameter that is cut among the ranks
            own = own if to_local is None else to_local()
            if own.numel():
                extremes = torch.stack(own.aminmax())  # unlike isfinite(), needs no second tensor
                if not bool(extremes.isfinite().all()):
                    return name, float(extremes.sum())
        return None

    def check_trains(self, *, is_epoch_over: bool = False) -> None:
        """Stop a run that would go on for ever, or come to its end, without having trained anything.

        Raises:
            TrainingError: no batch of the first epoch led to an optimizer step.
        """
        num_batches = self.progress.num_batches
        is_time_to_judge = num_batches > 0 if is_epoch_over else num_batches >= MAX_BATCHES_BEFORE_FIRST_STEP
        has_trained = self.progress.global_step > 0
        if self.counts_empty_steps and self.saved_step is None:
            has_trained = self.last_loss is not None
        if has_trained or not is_time_to_judge:
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
