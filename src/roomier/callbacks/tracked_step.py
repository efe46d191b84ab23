"""One step of a run, tracked for all callbacks that ask for it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from roomier.api.engine import Engine
from roomier.api.kept_weights import held_by
from roomier.planner.dry_runs.places import named_places, telling_places

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView
    from roomier.memory.tracker import MemoryTracker

FIRST_STEP = 2
"""In the first the optimizer has no states yet."""
FIRST_STEP_OF_A_BUDGET = 4
"""Until the third, blocks keep the least: a budget of activations measures."""

_shared: WeakKeyDictionary[Engine, dict[int, TrackedStep]] = WeakKeyDictionary()


def first_step_of(trainer: TrainerView) -> int:
    """The first step of a run, from 1, that is like those after it."""
    return FIRST_STEP_OF_A_BUDGET if trainer.plan.activation.policy == "budget" else FIRST_STEP


def tracked_step(trainer: TrainerView, step: int) -> TrackedStep:
    """Step number ``step`` of the run of ``trainer``: the same object for all who ask."""
    steps = _shared.setdefault(trainer.engine, {})
    if step not in steps:
        steps[step] = TrackedStep(step)
    return steps[step]


class TrackedStep:
    """A step, and the one before it, in which it is learned what each tensor is for.

    Each callback calls :meth:`begin_batch` and :meth:`end_batch` in the hooks of that name; what the first of them did
    the others find done. Between the two hooks of a batch the tracker looks on, at what is logged, saved and validated
    between batches it does not.

    Attributes:
        step: its number in the run, from 1.
        tracker: of the step, once that is over; None before.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.tracker: MemoryTracker | None = None
        self._looking: MemoryTracker | None = None
        self._is_counting = False
        self._inside: ExitStack | None = None

    def is_due(self, trainer: TrainerView) -> bool:
        """Whether the batch that begins belongs to it or to the step before."""
        return self.tracker is None and trainer.global_step >= self.step - 2

    def begin_batch(self, trainer: TrainerView) -> None:
        """Look on."""
        if self._inside is not None or not self.is_due(trainer):
            return
        engine = trainer.engine
        if self._looking is None:
            from roomier.memory.tracker import MemoryTracker  # late: loads the sharding of torch

            callbacks = trainer.callbacks
            self._looking = MemoryTracker(engine.module, engine.optimizers, engine.device, lambda: held_by(callbacks))
        tracker = self._looking
        tracker.resume()
        self._inside = _told(tracker, trainer)
        if not self._is_counting and trainer.global_step == self.step - 1:
            tracker.restart()
            self._is_counting = True
        tracker.enter("forward")

    def end_batch(self, trainer: TrainerView) -> MemoryTracker | None:
        """Look away. The tracker, where the step is over with this batch."""
        self.pause()
        if self._looking is not None and trainer.global_step >= self.step:
            self._looking.close()
            self.tracker, self._looking = self._looking, None
            _shared.get(trainer.engine, {}).pop(self.step, None)
        return self.tracker

    def pause(self) -> None:
        """Look away, if it looks: an epoch that is left out, or an error, ends without the end of its batch."""
        inside, self._inside = self._inside, None
        if inside is None or self._looking is None:
            return
        inside.close()
        self._looking.enter("rest")
        self._looking.pause()


def _told(tracker: MemoryTracker, trainer: TrainerView) -> ExitStack:
    """Until it is closed, ``tracker`` is told which phase of the step and which part of the model runs."""

    engine, hooks = trainer.engine, trainer.engine.hooks

    def tell(place: str) -> None:
        tracker.place = place

    def after_backward() -> None:
        tracker.place = ""
        tracker.enter("update")

    def put_back() -> None:
        engine.hooks = hooks
        tracker.place = ""

    stack = ExitStack()
    stack.enter_context(telling_places(named_places(engine.module, engine.blocks), tell))
    engine.hooks = replace(
        hooks,
        before_backward=(*hooks.before_backward, lambda loss: tracker.enter("backward")),
        after_backward=(*hooks.after_backward, after_backward),
    )
    stack.callback(put_back)
    return stack
