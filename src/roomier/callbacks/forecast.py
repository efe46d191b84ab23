"""MemoryForecast: what was forecast for a run, held against a measured step of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roomier.api.callback import Callback
from roomier.api.kept_weights import KeepsWeights, kept_by
from roomier.callbacks.tracked_step import TrackedStep, first_step_of, tracked_step
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.rng import rng_state, set_rng_state
from roomier.hardware import this_machine
from roomier.planner.workload import Workload

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView
    from roomier.memory.tracker import MemoryTracker
    from roomier.planner.forecast import Forecast
    from roomier.planner.measured.record import Record


class MemoryForecast(Callback):
    """Tracks one of the first steps, and tells in one line what was forecast for its peak and what was measured.

    Both are stored in ``forecast.json`` in the run folder, from which ``roomier report RUN`` draws them, and
    ``memory/forecast_bytes`` and ``memory/measured_bytes`` go to the loggers, in bytes of the fullest rank.

    It is there by default in runs that were planned (``strategy="auto"``, ``memory_budget=...``) and in those whose
    model states exceed 1 GiB, unless they are compiled: a tracked step runs uncompiled, which takes more memory and
    rounds otherwise. A run that was not planned is forecast by a dry run of the plan it has, from the shapes its model
    had before it was built. The tracked step and the one before it are several times slower and compute the same; where
    nothing is compiled the weights are those of a run without it.

    Args:
        at_step: which step is tracked, from 2. None is that of a :class:`MemoryAnatomy` beside it, else 2, or 4 with a
            budget of activations, which measures until then.

    Attributes:
        record: forecast and truth; None before the step is over.

    Raises:
        RoomierError: no such step can be tracked.
    """

    def __init__(self, at_step: int | None = None) -> None:
        if at_step is not None and (not isinstance(at_step, int) or isinstance(at_step, bool) or at_step < 2):
            action = "Use 2 or more: in the first step the optimizer has no states yet"
            raise RoomierError("at_step", at_step, "is no step that can be tracked", action)
        self.at_step = at_step
        self.record: Record | None = None
        self._workload: Workload | None = None
        self._first_step = 2
        self._step: int | None = None  # None before the first batch
        self._is_over = True
        self._tracked: TrackedStep | None = None

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self.record = self._workload = self._tracked = self._step = None
        self._is_over = True
        if not pl_module.automatic_optimization:
            notice("MemoryForecast: nothing is forecast of a module that optimizes by hand")
            return
        first = first_step_of(trainer)
        if self.at_step is not None and self.at_step < first:
            problem = "is before step 4: until then a budget of activations measures, and blocks keep the least"
            raise RoomierError("at_step", self.at_step, problem, "Use 4 or more, or None")
        self._first_step = trainer.global_step + (self.at_step or first)
        self._is_over = False

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if self._is_over:
            return
        if self._step is None:  # only now every callback has begun
            self._step = self._first_step if self.at_step is not None else self._step_beside(trainer)
        if trainer.global_step < self._step - 2:
            return
        if self._tracked is None:
            self._tracked = tracked_step(trainer, self._step)
        if trainer.global_step == self._step - 1:
            self._note_workload(trainer, batch)
        self._tracked.begin_batch(trainer)

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._tracked is None:
            return
        tracker = self._tracked.end_batch(trainer)
        if tracker is not None:
            self._tracked, self._is_over = None, True
            self._finish(trainer, tracker)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if not self._is_over:
            notice(
                f"MemoryForecast: training ended before step {self._step or self._first_step}, which was to be tracked"
            )

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._pause()

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        self._pause()

    def _step_beside(self, trainer: TrainerView) -> int:
        """Return the step of a MemoryAnatomy: one tracker serves both callbacks."""
        from roomier.callbacks.memory_anatomy import MemoryAnatomy  # late: loads rich

        steps = (each.next_step for each in trainer.callbacks if isinstance(each, MemoryAnatomy))
        return next(steps, None) or self._first_step

    def _pause(self) -> None:
        if self._tracked is not None:
            self._tracked.pause()

    def _note_workload(self, trainer: TrainerView, batch: Any) -> None:
        """Keep the micro-batch of the tracked step with the most samples. The last one of an epoch may have fewer."""
        if trainer.shapes is None:
            return
        found = replace(Workload.of(trainer.shapes, batch), copies=kept_by(trainer.callbacks, now=True))
        if self._workload is None or found.batch_size > self._workload.batch_size:
            self._workload = found

    def _finish(self, trainer: TrainerView, tracker: MemoryTracker) -> None:
        from roomier.planner.measured.record import Record  # late: loads the sharding of torch

        measured = _measured_of_all(trainer, tracker)
        forecast, reason = trainer.ranks.on_zero(lambda: _forecast(trainer, self._workload))
        workload, self._workload = self._workload, None
        if forecast is None:
            notice(f"memory: no forecast, so none is held against what was measured ({reason})")
            return
        choice = trainer.choice
        self.record = record = Record(
            forecast=forecast,
            step=trainer.global_step,
            ranks=measured,
            budget_bytes=None if choice is None else choice.budget_bytes,
            source="dry run" if choice is None else "planned",
            notes=tuple(_notes(trainer)),
            num_parameters=None if workload is None else workload.num_parameters,
        )
        notice(record.line())
        trainer.log_metrics(
            {
                "memory/forecast_bytes": float(record.forecast_bytes),
                "memory/measured_bytes": float(record.measured_bytes),
            }
        )
        if trainer.is_global_zero and trainer.keeps_files:
            try:
                record.write(Path(trainer.log_dir))
            except OSError as error:  # hours of training are worth more than this file
                notice(f"{trainer.log_dir}/forecast.json cannot be written ({error.strerror}); the run goes on")


def _measured_of_all(trainer: TrainerView, tracker: MemoryTracker) -> tuple[Any, ...]:
    """By rank: of the fullest all of the step, of the others their peak."""
    from roomier.planner.measured.record import Measured  # late: loads the sharding of torch

    rank = trainer.ranks.world.rank
    own = Measured.of(rank, tracker)
    peaks = trainer.ranks.gather(replace(own, timeline=(own.peak,)))
    worst = max(peaks, key=lambda each: each.peak_bytes).rank
    whole = trainer.ranks.gather(own if rank == worst else None)
    return tuple(whole[index] or peak for index, peak in enumerate(peaks))


def _forecast(trainer: TrainerView, workload: Workload | None) -> tuple[Forecast | None, str]:
    """What was planned; else a dry run of the plan at hand, or why there is none."""
    planned = None if trainer.choice is None else trainer.choice.chosen
    if planned is not None and planned.plan == trainer.plan:
        return planned, ""
    if workload is None:
        return None, "the model could not be copied as shapes before it was built"
    from roomier.planner.dry_runs.confirm import confirm  # late: loads the sharding of torch

    plan = trainer.plan
    state = rng_state()
    try:
        machine = this_machine.this_machine(plan.parallel.devices, plan.parallel.num_nodes, plan.parallel.accelerator)
        return confirm(workload, plan, machine), ""
    except Exception as error:  # a forecast that fails must not end the run it is about
        return None, f"{type(error).__name__}: {error}"
    finally:
        set_rng_state(state)


def _notes(trainer: TrainerView) -> list[str]:
    notes = [
        f"The copy of the weights that {type(each).__name__} keeps is forecast, but it is not there yet."
        for each in trainer.callbacks
        if trainer.choice is not None and isinstance(each, KeepsWeights) and not list(each.held_weights())
    ]
    if trainer.plan.compile.enabled:
        notes.append("Compiled blocks ran uncompiled in the tracked step; compiled they need less.")
    return notes
