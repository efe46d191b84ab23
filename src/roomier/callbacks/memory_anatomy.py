"""MemoryAnatomy: what one step holds in memory, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from roomier.api.callback import Callback
from roomier.callbacks.tracked_step import TrackedStep, first_step_of, tracked_step
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.memory.anatomy_table import Anatomy, KeepsPeak

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView
    from roomier.memory.tracker import MemoryTracker


class MemoryAnatomy(KeepsPeak, Callback):
    """Tracks one step, prints its table on standard error, and logs ``anatomy/peak/activations`` and the like, in bytes
    of the fullest rank, to the loggers.

    The tracked step and the one before it, in which it is learned what each tensor is for, are several times slower and
    compute the same. Other steps are not touched.

    Args:
        at_step: which step of the run is tracked, from 2: only then the optimizer has its states. None is 2, and 4 with
            a budget of activations: until the third step blocks keep the least.
        every_n_steps: track again each time so many steps later; None: never.

    Attributes:
        anatomy: of the last tracked step; None before.

    Raises:
        RoomierError: a number is too small; with a budget, when training starts.
    """

    def __init__(self, at_step: int | None = None, every_n_steps: int | None = None) -> None:
        if at_step is not None and (not isinstance(at_step, int) or at_step < 2):
            action = "Use 2 or more: in the first step the optimizer has no states yet"
            raise RoomierError("at_step", at_step, "is no step that can be tracked", action)
        if every_n_steps is not None and (not isinstance(every_n_steps, int) or every_n_steps < 2):
            raise RoomierError("every_n_steps", every_n_steps, "is too often", "Use 2 or more, or None")
        self.at_step = at_step
        self.every_n_steps = every_n_steps
        self.anatomy: Anatomy | None = None
        self._next_step: int | None = None
        self._tracked: TrackedStep | None = None

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        first = first_step_of(trainer)
        if self.at_step is not None and self.at_step < first:
            problem = "is before step 4: until then a budget of activations measures, and blocks keep the least"
            raise RoomierError("at_step", self.at_step, problem, "Use 4 or more, or None")
        self._next_step = trainer.global_step + (self.at_step or first)

    @property
    def next_step(self) -> int | None:
        """Number of the step that is tracked next; None where none is."""
        return self._next_step

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if self._next_step is None or trainer.global_step < self._next_step - 2:
            return
        if self._tracked is None:
            self._tracked = tracked_step(trainer, self._next_step)
        self._tracked.begin_batch(trainer)

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._tracked is None:
            return
        tracker = self._tracked.end_batch(trainer)
        if tracker is not None:
            self._finish(trainer, tracker)

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self.anatomy is None:
            notice(f"MemoryAnatomy: training ended before step {self._next_step}, which was to be tracked")

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._pause()  # an epoch that is left out ends without the end of its batch

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        self._pause()

    def _pause(self) -> None:
        if self._tracked is not None:
            self._tracked.pause()

    def _finish(self, trainer: TrainerView, tracker: MemoryTracker) -> None:
        from roomier.memory.measure import anatomy_of, peak_of  # late: loads the sharding of torch

        self.peak = peak_of(tracker, trainer.global_step)
        self._tracked = None
        self._next_step = None if self.every_n_steps is None else trainer.global_step + self.every_n_steps
        self.anatomy = anatomy_of(trainer)
        if trainer.is_global_zero:
            Console(stderr=True).print(self.anatomy.table())
        worst = self.anatomy.worst
        assert worst.peak is not None
        trainer.log_metrics({f"anatomy/peak/{row}": float(count) for row, count in worst.peak.whole.items()})
