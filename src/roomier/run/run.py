"""Run: the state of one call of fit, validate, test or predict."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.api.engine import Engine
from roomier.api.hooks import HookTable
from roomier.api.lightning_module import LightningAdapter
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.checkpoint.uploads import Uploads
from roomier.core.device.events import Events
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.data.source import Source
from roomier.loggers.group import LoggerGroup
from roomier.loggers.guarded import number_of
from roomier.plan import Plan
from roomier.run.logged.results import Results
from roomier.run.options import LoopOptions
from roomier.run.progress import Now, Progress, Saves
from roomier.run.schedulers import Schedulers
from roomier.run.settled import Settled
from roomier.run.signals import GracefulStop


@dataclass(frozen=True)
class Batches:
    """The data that the loops of a run read.

    Attributes:
        train: the training data of a fit; None in an evaluation.
        num_training: number of batches in a training epoch on each rank; infinite if unknown.
        evaluated: the loaders of an evaluation, or of the validation within a fit; empty if no validation runs.
        limits: maximum number of batches of each loader in ``evaluated``, over all ranks.
        val_interval: number of training batches between two validations; infinite to validate when an epoch ends, and 0
            if the interval is a time.
    """

    train: Source | None = None
    num_training: float = 0
    evaluated: Sequence[Source] = ()
    limits: Sequence[float] = ()
    val_interval: float = math.inf


@dataclass
class Run:
    """One run, with its settled facts, its progress, its pending saves, and the objects that its loops use.

    Attributes:
        settled: the facts of the run (plan, module, data, ranks, callbacks, folder). They do not change.
        engine: object that computes gradients and updates.
        hooks: the hooks that users override.
        schedulers: the learning rate schedulers.
        results: the values that the module logs.
        loggers: the loggers that receive rows of metrics.
        stop: object that records the signals that end the run.
        batches: the data that the loops read.
        progress: the counters that checkpoints store.
        now: the state of the current step, which is not stored.
        saves: written and pending checkpoints.
        looks: functions that every rank calls before each check that the loss is finite.
        profiler: profiler that is stepped after each optimizer step; None if no profiler is used.
        uploads: copies of the checkpoints in remote storage; None if the run has none, or has ended.
        events: seeds of the micro-batches; None if the generators continue from one step to the next.
    """

    settled: Settled
    engine: Engine
    hooks: HookTable
    schedulers: Schedulers
    results: Results
    loggers: LoggerGroup
    stop: GracefulStop
    batches: Batches
    progress: Progress = field(default_factory=Progress)
    now: Now = field(default_factory=Now)
    saves: Saves = field(default_factory=Saves)
    looks: list[Callable[[], None]] = field(default_factory=list)
    profiler: torch.profiler.profile | None = None
    uploads: Uploads | None = None
    events: Events | None = None

    def __post_init__(self) -> None:
        self._vote = Vote(self.ranks)
        self._is_minimum_reported = False

    # Facts that are read often.

    @property
    def module(self) -> Module:
        """The module that the run trains or evaluates."""
        return self.settled.request.module

    @property
    def plan(self) -> Plan:
        """The plan of the run."""
        return self.settled.plan

    @property
    def options(self) -> LoopOptions:
        """Settings of the loops."""
        return self.settled.request.options

    @property
    def ranks(self) -> Ranks:
        """The ranks of the run."""
        return self.settled.ranks

    @property
    def trainer(self) -> TrainerView:
        """The object that hooks receive. The loops read only its ``should_stop`` attribute."""
        return self.settled.request.trainer

    @property
    def callbacks(self) -> Sequence[Any]:
        """All callbacks of the run, in the order of their calls."""
        return self.settled.callbacks

    @property
    def folder(self) -> Path | None:
        """The run folder; None if the run writes no files."""
        return self.settled.start.folder

    @property
    def source(self) -> Source:
        """The training data of a fit."""
        assert self.batches.train is not None
        return self.batches.train

    @property
    def counts_empty_steps(self) -> bool:
        """True if a step without a loss counts as a step, as for a LightningModule."""
        return self.module.automatic_optimization and isinstance(self.module, LightningAdapter)

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs. An epoch is complete after its hooks and the following save point."""
        is_ending = self.now.is_in_step is False and self.progress.batch_idx == 0  # ``progress`` counts this epoch
        return self.progress.epoch - is_ending

    def is_at_its_end(self) -> bool:
        """Return True if a fit that starts or resumes at this point has no work to do."""
        if self.stop.received is not None or self.batches.num_training == 0:
            return True
        return self.progress.is_step_complete and self.is_over()

    def is_over(self) -> bool:
        """Return True if training ends at this save point. Signals are handled elsewhere."""
        progress, settled = self.progress, self.settled
        if progress.global_step >= settled.step_limit or progress.epoch >= settled.epoch_limit:
            return True
        return self.now.is_stop_agreed and self.has_minimum

    @property
    def has_minimum(self) -> bool:
        """True if the minimum numbers of epochs and steps are reached, so a request to stop ends training. A notice
        reports the first request that does not end training.
        """
        progress, options = self.progress, self.settled.request.options
        done = {"min_epochs": progress.epoch, "min_steps": progress.global_step}
        missing = [f"{name}={least}" for name in done if done[name] < (least := getattr(options, name) or 0)]
        if missing and not self._is_minimum_reported:
            self._is_minimum_reported = True
            notice(f"a stop was requested, but training continues until {' and '.join(missing)} is reached")
        return not missing

    @property
    def log_step(self) -> int:
        """Step number in the log: optimizer steps, or batches with manual optimization, as in Lightning."""
        return self.progress.global_step if self.module.automatic_optimization else self.progress.num_batches

    def _wants_to_stop(self) -> bool:
        request = self.settled.request
        max_time_s = request.options.max_time_s
        if max_time_s is not None and time.monotonic() - self.now.started_s >= max_time_s:
            return True
        return request.trainer.should_stop

    def vote(self, *, waits: bool = False) -> None:
        """Make all ranks stop at the same point after a signal or a request. Every rank must call this method.

        See [Note: ranks end together] in ``docs/design/train.md``.

        Args:
            waits: True to wait for the other ranks, so that the outcome applies immediately and not at the next vote.

        Raises:
            TrainingError: the ranks ran different units of a sharded model.
        """
        if self.settled.ranks.is_alone:
            self.now.is_stop_agreed = self._wants_to_stop()
            return
        num_ended = 0 if self.saves.background is None else self.saves.background.num_ended
        wishes = [int(self.stop.noted or 0), int(self._wants_to_stop()), -num_ended]
        outcome = (self._vote.settle if waits else self._vote.cast)(wishes, self.engine.trace)
        if self._vote.is_split:
            raise self._ran_other_parts()
        if outcome is None:
            return
        number, wants_to_stop, least_ended = outcome
        self.saves.num_ended = -least_ended
        self.now.is_stop_agreed = bool(wants_to_stop)
        if number:
            self.stop.received = signal.Signals(number)

    def _ran_other_parts(self) -> TrainingError:
        step = self.progress.global_step
        return TrainingError(
            "strategy",
            self.plan.parallel.strategy,
            f"the ranks ran different parts of the model, or ran them in a different order, in step {step} or the "
            "previous step, so collectives combined shards of different parameters",
            "Run the same parts on all ranks, or use strategy={'name': 'ddp', 'find_unused_parameters': True}. "
            "Resume from a checkpoint of an earlier step",
        )

    def is_background_save_over(self) -> bool:
        """Return True if, according to the last vote, the current background checkpoint has ended on all ranks."""
        background = self.saves.background
        if background is None or not background.is_busy:
            return False
        num_ended = background.num_ended if self.ranks.is_alone else self.saves.num_ended
        return num_ended == background.num_started

    @property
    def num_steps_in_all(self) -> float:
        """Total number of completed and remaining optimizer steps in the full run. Infinite if unknown."""
        if not self.module.automatic_optimization:
            return math.inf
        progress, settled, num_batches, num_left = self.progress, self.settled, self.batches.num_training, 0.0
        if settled.epoch_limit > progress.epoch:
            accumulation = settled.accumulation
            num_left = (num_batches - progress.batch_idx) / accumulation.at(progress.epoch)
            num_left = math.ceil(num_left) if math.isfinite(num_left) else num_left
            num_left += accumulation.num_steps(progress.epoch + 1, settled.epoch_limit, num_batches)
        return max(progress.global_step, min(progress.global_step + num_left, settled.step_limit))

    def log_metrics(self, metrics: dict[str, Any], own: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Write one row for the current step to the loggers. Values are copied to the host only in this method.

        Args:
            metrics: values that the module or a callback logged.
            own: values that the loop adds to the same row. If the module logs one of these names, or ``epoch``, the
                column contains the value of the module, and the value of the loop is written to the column
                ``trainer/NAME``.
        """
        row = {name: number_of(name, value) for name, value in metrics.items()}
        if (row or own) and self.loggers.loggers:
            epoch = self._own_column("epoch", row)
            rest = {self._own_column(name, row): number_of(name, value) for name, value in own.items()}
            self.loggers.log_metrics({epoch: self.progress.epoch, **row, **rest}, self.log_step)

    def log_evaluated_batch(self, values: Mapping[str, Any], index: int) -> None:
        """Write the row of one evaluation batch. As in Lightning, the step of the row is the index of the batch."""
        self.loggers.log_evaluated_batch({name: number_of(name, v) for name, v in values.items()}, index, self.log_step)

    def _own_column(self, name: str, row: Mapping[str, float]) -> str:
        if name not in row and name not in self.results.columns:
            return name
        column = f"trainer/{name}"
        if name not in self.now.renamed:
            self.now.renamed.add(name)
            of_trainer = f"The value of the Trainer is in {column!r}"
            notice(f"log({name!r}): the column {name!r} contains the logged value. {of_trainer}")
        return column

    def loss_number(self) -> float | None:
        """Return the loss of the last step as a number; None if no loss exists. This method waits for the device."""
        return None if self.now.last_loss is None else float(self.now.last_loss)

    def loss_of_all(self, losses: Sequence[float | None]) -> float | None:
        """Return the loss of the last step over all ranks, computed from the loss of each rank.

        The loss of each rank is a share of the loss of the global batch, so the losses are summed. With manual
        optimization, losses are averaged.
        """
        there = [loss for loss in losses if loss is not None]
        if not there:
            return None
        return sum(there) if self.module.automatic_optimization else sum(there) / len(there)


def run_of(trainer: TrainerView, name: str) -> Run:
    """Return the last run of ``trainer``. Use this function in library code that hooks call.

    Args:
        trainer: Trainer whose last run is returned.
        name: field that the error message names.

    Raises:
        RoomierError: ``trainer`` has not run yet.
    """
    run: Run | None = trainer.run
    if run is None:
        raise RoomierError(name, None, "this Trainer has not run anything yet", "Call fit first")
    return run


def call(hooks: Sequence[Callable[..., Any]], *arguments: Any) -> None:
    """Call each of ``hooks`` in order."""
    for hook in hooks:
        hook(*arguments)


class Vote:
    """Vote that computes the maximum of small integers over the ranks. Every rank must vote at the same points of its
    run.

    A vote is sent asynchronously and read at the next vote, so all ranks receive the outcome one vote later.

    Attributes:
        is_split: True if ``same`` was different on two ranks of a stage in a completed vote.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.is_split = False
        self._ranks = ranks
        self._sent: tuple[Any, Tensor] | None = None

    def cast(self, wishes: Sequence[int], same: int = 0) -> list[int] | None:
        """Send ``wishes`` without waiting.

        Args:
            wishes: integers that this rank proposes.
            same: number that must be equal on all ranks of a stage.

        Returns:
            The outcome of the previous vote; None for the first vote.
        """
        outcome = self._arrived()
        ballot = self._ballot(wishes, same)
        self._sent = dist.all_reduce(ballot, dist.ReduceOp.MAX, async_op=True), ballot
        return outcome

    def settle(self, wishes: Sequence[int], same: int = 0) -> list[int]:
        """Wait for all ranks. Return the maximum of ``wishes`` over all ranks and over a vote that is still in
        progress."""
        before = self._arrived()
        ballot = self._ballot(wishes, same)
        if not self._ranks.is_alone:
            dist.all_reduce(ballot, dist.ReduceOp.MAX)
        return [max(pair) for pair in zip(self._read(ballot), before or wishes, strict=True)]

    def _arrived(self) -> list[int] | None:
        if self._sent is None:
            return None
        (work, ballot), self._sent = self._sent, None
        work.wait()
        return self._read(ballot)

    def _read(self, ballot: Tensor) -> list[int]:
        outcome = ballot.tolist()
        of_stages = [(outcome.pop(), outcome.pop()) for _ in range(self._ranks.mesh.stage)]
        self.is_split = self.is_split or any(negative_of_least != -largest for negative_of_least, largest in of_stages)
        return outcome

    def _ballot(self, wishes: Sequence[int], same: int) -> Tensor:
        is_own = (stage == self._ranks.mesh.stage_index for stage in range(self._ranks.mesh.stage))
        return torch.tensor([*wishes, *(each if own else -(2**62) for own in is_own for each in (same, -same))])
