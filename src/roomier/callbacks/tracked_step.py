"""Memory tracking of one training step, shared by all callbacks that request this step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from roomier.api.callback import Callback, held_by
from roomier.api.engine import Engine
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.errors import RoomierError, check_integer
from roomier.plan.levers import update_mode
from roomier.planner.dry_runs.places import named_places, reporting_places

if TYPE_CHECKING:
    from roomier.planner.memory.tracker import MemoryTracker

FIRST_STEP = 2
"""During the first step, the optimizer states do not exist yet."""
FIRST_STEP_AFTER_A_DEFERRED_UPDATE = 3
"""The forward pass of the second step applies the first deferred update, which creates the optimizer states."""
FIRST_STEP_OF_A_BUDGET = 4
"""An activation budget measures the second step, and blocks save the chosen activations from the third step on. The
kinds of the tensors are identified in the third step.
"""

_shared: WeakKeyDictionary[Engine, dict[int, TrackedStep]] = WeakKeyDictionary()


def first_step_of(trainer: TrainerView) -> int:
    """Return the first step, counted from 1, that a callback may track."""
    return FIRST_STEP_OF_A_BUDGET if trainer.plan.activation.policy == "budget" else FIRST_STEP


def usual_step_of(trainer: TrainerView) -> int:
    """Return the step that is tracked by default: the first step whose memory is representative of later steps."""
    offload = trainer.plan.offload
    is_offloaded = offload.optimizer_states != "none" or offload.parameters != "none"
    is_deferred = is_offloaded and update_mode(trainer.plan) == "deferred"
    return max(first_step_of(trainer), FIRST_STEP_AFTER_A_DEFERRED_UPDATE if is_deferred else FIRST_STEP)


def tracked_step(trainer: TrainerView, step: int) -> TrackedStep:
    """Return the TrackedStep for step number ``step`` of the run. All calls with the same number return one object."""
    steps = _shared.setdefault(trainer.engine, {})
    if step not in steps:
        steps[step] = TrackedStep(step)
    return steps[step]


class TrackedStep:
    """Step whose memory is tracked. The step before it is also observed, to identify the kind of each tensor.

    Each callback must call :meth:`begin_batch` and :meth:`end_batch` in the corresponding hooks. After the first call
    for a batch, other calls have no effect. The tracker records only between the two hooks, so it excludes logging,
    saving and validation between batches.

    Args:
        step: number of the step in the run, counted from 1.

    Attributes:
        step: number of the step in the run, counted from 1.
        tracker: tracker of the completed step; None before the step ends.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.tracker: MemoryTracker | None = None
        self._looking: MemoryTracker | None = None
        self._is_counting = False
        self._inside: ExitStack | None = None

    def is_due(self, trainer: TrainerView) -> bool:
        """Return True if the current batch belongs to the tracked step or to the preceding step."""
        return self.tracker is None and trainer.global_step >= self.step - 2

    def begin_batch(self, trainer: TrainerView) -> None:
        """Start recording if the current batch belongs to the tracked step or to the preceding step."""
        if self._inside is not None or not self.is_due(trainer):
            return
        engine = trainer.engine
        if self._looking is None:
            from roomier.planner.memory.tracker import MemoryTracker  # late import: loads torch's sharding code

            callbacks = trainer.callbacks
            self._looking = MemoryTracker(engine.module, engine.optimizers, engine.device, lambda: held_by(callbacks))
        tracker = self._looking
        tracker.resume()
        self._inside = _report_phases(tracker, trainer)
        if not self._is_counting and trainer.global_step == self.step - 1:
            tracker.restart()
            self._is_counting = True
        tracker.enter("forward")

    def end_batch(self, trainer: TrainerView) -> MemoryTracker | None:
        """Stop recording. Return the tracker if this batch completes the step."""
        self.pause()
        if self._looking is not None and trainer.global_step >= self.step:
            self._looking.close()
            self.tracker, self._looking = self._looking, None
            _shared.get(trainer.engine, {}).pop(self.step, None)
        return self.tracker

    def pause(self) -> None:
        """Stop an active recording. After a skipped epoch or an error, :meth:`end_batch` is not called."""
        inside, self._inside = self._inside, None
        if inside is None or self._looking is None:
            return
        inside.close()
        self._looking.enter("rest")
        self._looking.pause()


class TracksStep(Callback, ABC):
    """Base class for callbacks that evaluate a tracked step. A subclass must set ``next_step`` when training
    starts.

    Args:
        at_step: step to track, counted from 1 at the start of the fit; None selects the first representative step.

    Raises:
        RoomierError: ``at_step`` is not an integer of at least 2.
    """

    reads_parameters = False
    next_step: int | None = None
    """Number of the next step to track; None if no further step is tracked."""
    _tracked: TrackedStep | None = None

    def __init__(self, at_step: int | None) -> None:
        if at_step is not None:
            action = "Use at least 2, because the optimizer has no states during the first step"
            check_integer("at_step", at_step, FIRST_STEP, action)
        self.at_step = at_step

    def step_to_track(self, trainer: TrainerView) -> int:
        """Return the number of the step to track, counted over the run. Called when training starts.

        Raises:
            RoomierError: ``at_step`` is too small for an activation budget.
        """
        if self.at_step is not None and self.at_step < first_step_of(trainer):
            problem = "must be at least 4, because an activation budget runs measurements before step 4"
            raise RoomierError("at_step", self.at_step, problem, "Use at least 4, or None")
        return trainer.global_step + (self.at_step or usual_step_of(trainer))

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if self.next_step is None or trainer.global_step < self.next_step - 2:
            return
        if self._tracked is None:
            self._tracked = tracked_step(trainer, self.next_step)
        self._tracked.begin_batch(trainer)

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        if self._tracked is None:
            return
        tracker = self._tracked.end_batch(trainer)
        if tracker is not None:
            self._tracked = None
            self._finish(trainer, tracker)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._pause()  # if the epoch is skipped, on_train_batch_end is not called

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        self._pause()

    def _pause(self) -> None:
        if self._tracked is not None:
            self._tracked.pause()

    @abstractmethod
    def _finish(self, trainer: TrainerView, tracker: MemoryTracker) -> None:
        """Evaluate the completed step. Every rank must call this method."""


def _report_phases(tracker: MemoryTracker, trainer: TrainerView) -> ExitStack:
    """Report the current phase and the current module to ``tracker`` until the returned stack is closed."""

    engine, hooks = trainer.engine, trainer.engine.hooks

    def set_place(place: str) -> None:
        tracker.place = place

    def after_backward() -> None:
        tracker.place = ""
        tracker.enter("update")

    def restore() -> None:
        engine.hooks = hooks
        tracker.place = ""

    stack = ExitStack()
    stack.enter_context(reporting_places(named_places(engine.module, engine.blocks), set_place))
    engine.hooks = replace(
        hooks,
        before_backward=(*hooks.before_backward, lambda loss: tracker.enter("backward")),
        after_backward=(*hooks.after_backward, after_backward),
    )
    stack.callback(restore)
    return stack
