"""``trainer.state``: what is called, what runs, and how it stands, in the words that callbacks compare with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TrainerFn(StrEnum):
    """The method of the Trainer that was called last."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """What runs within it."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """What the names of the loader of this stage begin with."""
        return {"sanity_check": "val", "validate": "val"}.get(self.value, self.value)


class TrainerStatus(StrEnum):
    """How the last call stands."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


STAGE_OF_FLAG = {
    "training": RunningStage.TRAINING,
    "validating": RunningStage.VALIDATING,
    "testing": RunningStage.TESTING,
    "predicting": RunningStage.PREDICTING,
    "sanity_checking": RunningStage.SANITY_CHECKING,
}
"""The stage that each flag of the Trainer stands for."""


@dataclass(frozen=True)
class TrainerState:
    """A moment of a Trainer. Each compares equal to the string it is, so ``state.fn == "fit"``."""

    fn: TrainerFn | None = None
    stage: RunningStage | None = None
    status: TrainerStatus = TrainerStatus.INITIALIZING

    @property
    def finished(self) -> bool:
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        return self.status.stopped
