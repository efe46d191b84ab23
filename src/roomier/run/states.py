"""``trainer.state``: the method that was called, the loop that is running, and the status of the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class TrainerFn(StrEnum):
    """The method of the Trainer that was called last."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """The loop that is running."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """True in validation, test and the sanity check."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


class TrainerStatus(StrEnum):
    """The status of the last call."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """True if the last call finished or was interrupted."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


@dataclass
class TrainerState:
    """The current state of a Trainer. The values compare equal to strings: ``state.fn == "fit"``.

    Attributes:
        fn: the method that was called last.
        stage: the loop that is running; None between two runs.
        status: the status of the last call.
    """

    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING

    @property
    def finished(self) -> bool:
        """True if the last call finished."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """True if the last call finished or was interrupted."""
        return self.status.stopped

    @contextmanager
    def within(self, stage: RunningStage) -> Iterator[None]:
        """Set ``stage`` inside the context, and restore the previous stage at the end."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before
