"""MemoryForecast: callback that compares the forecast memory of a run with a measured step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roomier.api.callback import KeepsWeights, kept_by
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.tracked_step import TracksStep
from roomier.core.device.rng import preserved_rng
from roomier.core.log import notice
from roomier.planner.hardware import this_machine
from roomier.planner.workload import Workload

if TYPE_CHECKING:
    from roomier.planner.forecast import Forecast
    from roomier.planner.measured.record import ForecastRecord
    from roomier.planner.memory.tracker import MemoryTracker


class MemoryForecast(TracksStep):
    """Callback that measures the peak memory of one of the first steps, and prints the forecast and the measurement in
    one line.

    Both values are also written to ``forecast.json`` in the run folder, which ``roomier report RUN`` reads, and logged
    as ``memory/forecast_bytes`` and ``memory/measured_bytes`` for the rank with the highest peak.

    By default, the Trainer adds this callback to planned runs (``strategy="auto"``, ``memory_budget=...``) and to runs
    with at least 1 GiB of model states on a rank. Compiled runs are excluded, because a tracked step runs uncompiled,
    uses more memory and rounds differently. If a run was not planned, the forecast is the result of a dry run of its
    plan. The dry run uses the shapes of the model, which were recorded before the model was built.

    The tracked step and the step before it are several times slower than other steps, but compute the same values. If
    the model is not compiled, the weights are equal to the weights of a run without this callback.

    Args:
        at_step: step to track, counted from 1 at the start of the fit; at least 2. If None, the tracked step is the
            step of a :class:`MemoryAnatomy` in the same Trainer. Without a MemoryAnatomy, step 2 is tracked. With
            deferred updates, step 3 is tracked, because the first update runs in step 2. With an activation budget,
            step 4 is tracked, because the budget runs measurements in the first steps.

    Attributes:
        record: forecast and measurement; None before the tracked step ends.

    Raises:
        RoomierError: ``at_step`` is not an integer of at least 2. When training starts with an activation budget, the
            error is also raised if ``at_step`` is less than 4.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[MemoryForecast(at_step=10)])
    """

    reads_parameters = False

    def __init__(self, at_step: int | None = None) -> None:
        super().__init__(at_step)
        self.record: ForecastRecord | None = None
        self._workload: Workload | None = None

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self.record = self._workload = self._tracked = self.next_step = None
        if not pl_module.automatic_optimization:
            notice("MemoryForecast: a forecast is not available for modules with manual optimization")
            return
        self.next_step = self.step_to_track(trainer)

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if self.next_step is None:
            return
        if self._tracked is None and self.at_step is None:  # shares the tracker of a MemoryAnatomy
            others = (each for each in trainer.callbacks if isinstance(each, TracksStep) and each is not self)
            self.next_step = next((each.next_step for each in others), None) or self.next_step
        if trainer.global_step == self.next_step - 1:
            self._note_workload(trainer, batch)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self.next_step is not None:
            notice(f"MemoryForecast: training ended before step {self.next_step}, the step to track")

    def _note_workload(self, trainer: TrainerView, batch: Any) -> None:
        """Store the shapes of ``batch`` if it is the largest micro-batch of the tracked step so far. The last
        micro-batch of an epoch can have fewer samples."""
        if trainer.shapes is None:
            return
        found = replace(Workload.of(trainer.shapes, batch), copies=kept_by(trainer.callbacks, now=True))
        if self._workload is None or found.batch_size > self._workload.batch_size:
            self._workload = found

    def _finish(self, trainer: TrainerView, tracker: MemoryTracker) -> None:
        from roomier.planner.measured.record import ForecastRecord  # late import: loading torch's sharding code is slow

        self.next_step = None
        measured = _measured_of_all(trainer, tracker)
        forecast, reason = trainer.ranks.on_zero(lambda: _forecast(trainer, self._workload))
        workload, self._workload = self._workload, None
        if forecast is None:
            notice(f"memory: there is no forecast to compare with the measurement ({reason})")
            return
        choice = trainer.choice
        self.record = record = ForecastRecord(
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
            except OSError as error:  # an error during the write must not end the run
                notice(f"{trainer.log_dir}/forecast.json cannot be written ({error.strerror}); the run continues")


def _measured_of_all(trainer: TrainerView, tracker: MemoryTracker) -> tuple[Any, ...]:
    """Return the measurement of each rank. Only the measurement with the highest peak contains the full timeline."""
    from roomier.planner.measured.record import TrackedRank  # late import: loading torch's sharding code is slow

    rank = trainer.ranks.world.rank
    own = TrackedRank.of(rank, tracker)
    peaks = trainer.ranks.gather(replace(own, timeline=(own.peak,)))
    worst = max(peaks, key=lambda each: each.peak_bytes).rank
    whole = trainer.ranks.gather(own if rank == worst else None)
    return tuple(whole[index] or peak for index, peak in enumerate(peaks))


def _forecast(trainer: TrainerView, workload: Workload | None) -> tuple[Forecast | None, str]:
    """Return the planned forecast or, if there is none for the current plan, the result of a dry run.

    Returns:
        The forecast and an empty string; if the forecast fails, None and the reason.
    """
    planned = None if trainer.choice is None else trainer.choice.chosen
    if planned is not None and planned.plan == trainer.plan:
        return planned, ""
    if workload is None:
        return None, "the shapes of the model could not be recorded before the model was built"
    from roomier.planner.dry_runs.confirm import confirm  # late import: loading torch's sharding code is slow

    plan = trainer.plan
    try:
        parallel, folder = plan.parallel, plan.offload.folder
        with preserved_rng():
            machine = this_machine.this_machine(parallel.devices, parallel.num_nodes, parallel.accelerator, folder)
            return confirm(workload, plan, machine), ""
    except Exception as error:  # an error during the forecast must not end the run
        return None, f"{type(error).__name__}: {error}"


def _notes(trainer: TrainerView) -> list[str]:
    notes = [
        f"The forecast includes the copy of the weights that {type(each).__name__} creates later."
        for each in trainer.callbacks
        if trainer.choice is not None and isinstance(each, KeepsWeights) and not list(each.held_weights())
    ]
    if trainer.plan.compile.enabled:
        notes.append(
            "Compiled blocks ran without compilation in the tracked step. With compilation, these blocks require less "
            "memory."
        )
    return notes
