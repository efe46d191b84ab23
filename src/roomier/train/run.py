"""Run: everything one call of fit, validate, test or predict works with."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roomier.api.hooks import HookTable
from roomier.api.lightning import LightningAdapter
from roomier.api.module import Module
from roomier.checkpoint import BackgroundSaver
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.log import notice
from roomier.core.metric_names import check_metric_name
from roomier.core.ranks import Ranks
from roomier.core.tree import batch_size_of
from roomier.core.vote import Vote
from roomier.data.source import Source
from roomier.engine.eager import EagerEngine
from roomier.loggers.group import LoggerGroup
from roomier.plan import Plan
from roomier.train.accumulation import accumulation_at, num_steps_between
from roomier.train.options import LoopOptions
from roomier.train.progress import Progress
from roomier.train.results import Results
from roomier.train.schedulers import Schedulers
from roomier.train.signals import GracefulStop

if TYPE_CHECKING:
    from roomier.trainer import Trainer

MAX_BATCHES_BEFORE_FIRST_STEP = 1000  # of an epoch whose end does not come


@dataclass(frozen=True)
class WantedSave:
    """A checkpoint that was asked for; the arguments are those of :func:`roomier.train.save.save_checkpoint`."""

    path: Path
    weights_only: bool = False
    asynchronous: bool = False
    when_committed: Callable[[], None] | None = None


@dataclass(slots=True)
class Window:
    """The micro-batches of one optimizer step, as the loader gave them.

    Attributes:
        first_batch: the index of the first micro-batch in its epoch.
    """

    epoch: int
    first_batch: int
    batches: Sequence[Any]


@dataclass
class Run:
    """Made by :mod:`roomier.train.session`, worked through by the loops; plain data and a few questions to it.

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
        window: of the last step, or the one that runs.
        leaves_out_step: a hook before an update asked that it is not done; the step counts for nothing.
        looks: called, on every rank, before a loss that is not finite would end the run.
        renamed: columns of the loop that moved to ``trainer/NAME``.
        is_stop_agreed: on several ranks, all know that one of them wants training to end.
        num_saves_ended: how many checkpoints that were written beside the training all know to have come to their end.
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
    window: Window | None = None
    leaves_out_step: bool = False
    looks: list[Callable[[], None]] = field(default_factory=list)
    renamed: set[str] = field(default_factory=set)
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

    def log_metrics(self, metrics: dict[str, Any], own: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write one row to the loggers at the current step. Here, and only here, values leave their device.

        Args:
            metrics: what the module or a callback logged.
            own: values of the loop for the same row. If the module logs one of these names, or ``epoch``, the column is
                the module's, and the value of the loop has the column ``trainer/NAME``.
        """
        row = {name: _number(name, value) for name, value in metrics.items()}
        if (row or own) and self.loggers.loggers:
            epoch = self._own_column("epoch", row)
            rest = {self._own_column(name, row): _number(name, value) for name, value in own.items()}
            self.loggers.log_metrics({epoch: self.progress.epoch, **row, **rest}, self.progress.global_step)

    def _own_column(self, name: str, row: Mapping[str, float]) -> str:
        if name not in row and name not in self.results.columns:
            return name
        column = f"trainer/{name}"
        if name not in self.renamed:
            self.renamed.add(name)
            notice(f"log({name!r}): the column {name!r} holds the logged value; the value of the Trainer is {column!r}")
        return column

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
        if self.engine.scaler is not None and self.engine.scaler.factor >= 1.0:
            return
        losses = losses or [self.loss_number()]
        found = [rank for rank, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)]
        if found:
            problem = (
                f"is not finite{self._on(found)} at step {self.progress.global_step} ({where}; it is looked at every "
                f"log_every_n_steps={self.options.log_every_n_steps} steps, before each checkpoint and after each "
                "epoch)"
            )
            raise TrainingError("loss", losses[found[0]], *self._explained(problem, found))

    def _on(self, ranks: Sequence[int]) -> str:
        """Where something was found, in the words of an error."""
        if self.ranks.is_alone:
            return ""
        if len(ranks) == self.ranks.world.size:
            return f" on all {len(ranks)} ranks"
        return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

    def _explained(self, problem: str, found: Sequence[int]) -> tuple[str, str]:
        """``problem`` on the ranks ``found``, with its cause if the last batch shows it, and what to do."""
        empty = self._batch_without_terms()
        if empty is None:
            return problem, self._way_back(found)
        action = "Leave such samples out, in the data set or in collate_fn"
        return f"{problem}: {empty}, so the mean over its labels is 0/0", f"{self._saved()} {action}"

    def _batch_without_terms(self) -> str | None:
        """The batch of the last step, if its loss is a mean over no terms. Where losses are weighted by their terms, on
        several ranks or with accumulated gradients, such a batch is left out."""
        window = self.window
        if window is None or len(window.batches) > 1 or not self.ranks.is_alone or self.module.loss_reduction != "mean":
            return None
        with suppress(Exception):  # the count is the user's code, and the error that is being told matters more
            if int(self.module.num_loss_terms(window.batches[0])) == 0:
                is_empty = batch_size_of(window.batches[0]) == 0
                problem = "holds no samples" if is_empty else "has ignored labels only (-100)"
                return f"batch {window.first_batch} of epoch {window.epoch} {problem}"
        return None

    def check_finite_weights(self) -> None:
        """Stop before weights that are no numbers take the place of good ones: a finite loss can ruin them. Every rank
        must call it; each looks at its part.

        Raises:
            TrainingError: a parameter that is trained holds NaN or infinity.
        """
        found = {rank: each for rank, each in enumerate(self.ranks.gather(self._not_finite())) if each is not None}
        if found:
            name, value = next(iter(found.values()))
            on_ranks = self._on([rank for rank, (other, _) in found.items() if other == name])
            problem = f"this parameter is not finite{on_ranks} after step {self.progress.global_step}"
            raise TrainingError(name, value, f"{problem} (before a checkpoint)", self._way_back(list(found)))

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

    def _way_back(self, found: Sequence[int]) -> str:
        advice = "Lower the learning rate, set gradient_clip_val, or find the operation: Trainer(detect_anomaly=True)"
        if len(found) > 1:  # the sum of the gradients of all ranks has made the weights NaN on all of them
            advice += ". To find the rank where it begins, set log_every_n_steps=1 as well"
        return f"{self._saved()} {advice}"

    def _saved(self) -> str:
        if self.saved_step is None:
            return "No checkpoint was written yet."
        return f"The checkpoint of step {self.saved_step} is untouched: fit(ckpt_path='last') goes on from it."


def _ceil(number: float) -> float:
    return math.ceil(number) if math.isfinite(number) else number


def _number(name: str, value: Any) -> float:
    check_metric_name("log_metrics", str(name))
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoomierError("log_metrics", (name, value), "is not a number", "Pass numbers and 0-dim tensors") from error


def call(hooks: Sequence[Callable[..., Any]], *arguments: Any) -> None:
    """Each of ``hooks``, in order."""
    for hook in hooks:
        hook(*arguments)
