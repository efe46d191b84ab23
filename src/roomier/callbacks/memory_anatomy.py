"""MemoryAnatomy: callback that measures the memory of one training step by kind of tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.tracked_step import TracksStep
from roomier.core.errors import check_integer
from roomier.core.log import notice
from roomier.planner.memory.anatomy_table import Anatomy, KeepsPeak

if TYPE_CHECKING:
    from roomier.planner.memory.tracker import MemoryTracker


class MemoryAnatomy(KeepsPeak, TracksStep):
    """Callback that measures the memory of one training step by kind of tensor, prints a table to standard error, and
    logs the peak.

    The metrics, such as ``anatomy/peak/activations``, are sizes in bytes on the rank with the highest peak. The tracked
    step and the step before it are several times slower than other steps, but compute the same values. The step before
    the tracked step identifies the kind of each tensor.

    Args:
        at_step: step to track, counted from 1 at the start of the fit. The minimum is 2, because the optimizer has no
            states before step 2. If None, step 2 is tracked. With deferred updates, step 3 is tracked, because the
            first update creates the states in step 2. With an activation budget, step 4 is tracked, because the kinds
            of the tensors are identified in step 3, which is the first step with the chosen activations.
        every_n_steps: number of steps after which another step is tracked; None tracks only one step.

    Attributes:
        anatomy: memory of the last tracked step; None before the end of the first tracked step.
        next_step: number of the next step to track; None if no further step is tracked.

    Raises:
        RoomierError: ``at_step`` or ``every_n_steps`` is not an integer of at least 2. If ``at_step`` is too small for
            an activation budget, the error is raised when training starts.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[MemoryAnatomy(at_step=10)])
    """

    reads_parameters = False

    def __init__(self, at_step: int | None = None, every_n_steps: int | None = None) -> None:
        super().__init__(at_step)
        if every_n_steps is not None:
            check_integer("every_n_steps", every_n_steps, 2, "Use a larger number, or None")
        self.every_n_steps = every_n_steps
        self.anatomy: Anatomy | None = None

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self.next_step = self.step_to_track(trainer)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self.anatomy is None:
            notice(f"MemoryAnatomy: training ended before step {self.next_step}, the step to track")

    def _finish(self, trainer: TrainerView, tracker: MemoryTracker) -> None:
        from roomier.planner.memory.measure import (  # late import: loading torch's sharding code is slow
            anatomy_of,
            peak_of,
        )

        self.peak = peak_of(tracker, trainer.global_step)
        self.next_step = None if self.every_n_steps is None else trainer.global_step + self.every_n_steps
        self.anatomy = anatomy_of(trainer)
        if trainer.is_global_zero:
            Console(stderr=True).print(self.anatomy.table())
        worst = self.anatomy.worst
        assert worst.peak is not None
        trainer.log_metrics({f"anatomy/peak/{row}": float(count) for row, count in worst.peak.whole.items()})
