"""Timer: callback that measures the stages of a run and stops training after a given time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.errors import RoomierError
from roomier.core.forms import FormError, fields, finite, mapping_of
from roomier.core.log import notice
from roomier.core.units import parse_duration_s

STAGES = ("train", "sanity_check", "validate", "test", "predict")


def _hooks_of(stage: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks at the start and at the end of ``stage``."""

    def start(self: Timer, trainer: TrainerView, pl_module: Module) -> None:
        self._started_s[stage], self._ended_s[stage] = time.monotonic(), None

    def end(self: Timer, trainer: TrainerView, pl_module: Module) -> None:
        self._ended_s[stage] = time.monotonic()

    return start, end


class Timer(Callback):
    """Callback that measures the time of each stage and stops training after ``duration``.

    The arguments are the same as in Lightning. In a resumed run, the measured time includes the training time before
    the checkpoint, in contrast to ``Trainer(max_time=...)``. With several ranks, the first rank that exceeds
    ``duration`` stops training on all ranks at the same step.

    Args:
        duration: maximum training time as ``"DD:HH:MM:SS"``, a ``timedelta``, or a dict of its arguments; with None,
            the callback only measures the time.
        interval: check the elapsed time after each ``"step"`` or after each ``"epoch"``.
        verbose: if True, print a notice to standard error when ``duration`` is exceeded.

    Raises:
        RoomierError: an argument is invalid.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[Timer(duration="00:12:00:00")])
    """

    reads_parameters = False

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise RoomierError("Timer(interval)", interval, "is not an interval", "Use 'step' or 'epoch'")
        self._duration_s = None if duration is None else parse_duration_s("Timer(duration)", duration, may_be_zero=True)
        self._interval = interval
        self._verbose = verbose
        self._started_s: dict[str, float | None] = dict.fromkeys(STAGES)
        self._ended_s: dict[str, float | None] = dict.fromkeys(STAGES)
        self._earlier_s = 0.0  # training time before the checkpoint

    def start_time(self, stage: str = "train") -> float | None:
        """Return the time at which a stage last started, in seconds of ``time.monotonic``; None if the stage has not
        started.

        Args:
            stage: ``"train"``, ``"validate"``, ``"test"``, ``"predict"`` or ``"sanity_check"``.
        """
        return self._started_s[_stage(stage)]

    def end_time(self, stage: str = "train") -> float | None:
        """Return the time at which a stage last ended, in seconds of ``time.monotonic``; None if the stage has not
        ended."""
        return self._ended_s[_stage(stage)]

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the duration of a stage so far, in seconds. The duration of training includes the time before the
        checkpoint."""
        started, ended = self.start_time(stage), self.end_time(stage)
        earlier = self._earlier_s if stage == "train" else 0.0
        if started is None:
            return earlier
        return earlier + (time.monotonic() if ended is None else ended) - started

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the remaining seconds of ``duration``; None if ``duration`` is None."""
        return None if self._duration_s is None else self._duration_s - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        fields({}, others={"time_elapsed": mapping_of(finite)})(state, place)
        for stage, elapsed_s in state.get("time_elapsed", {}).items():
            if elapsed_s > timedelta.max.total_seconds():
                raise FormError(f"{place}.time_elapsed.{stage}", elapsed_s, f"at most {timedelta.max}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._started_s["train"] is not None:  # do not reset the elapsed time after a rollback
            return
        self._earlier_s = float(state_dict.get("time_elapsed", {}).get("train", 0.0))

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._started_s["train"] = self._ended_s["train"] = None

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._check(trainer)  # a resumed run may have no time left

    on_train_start, on_train_end = _hooks_of("train")
    on_sanity_check_start, on_sanity_check_end = _hooks_of("sanity_check")
    on_validation_start, on_validation_end = _hooks_of("validate")
    on_test_start, on_test_end = _hooks_of("test")
    on_predict_start, on_predict_end = _hooks_of("predict")

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        if self._interval == "step":
            self._check(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._interval == "epoch":
            self._check(trainer)

    def _check(self, trainer: TrainerView) -> None:
        remaining_s = self.time_remaining()
        if remaining_s is None or remaining_s > 0 or trainer.should_stop:
            return
        trainer.should_stop = True
        if self._verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            notice(f"Timer: training reached its maximum duration after {elapsed}, at step {trainer.global_step}")


def _stage(stage: str) -> str:
    if stage not in STAGES:
        raise RoomierError("Timer: stage", stage, "is not a stage", f"Use one of {', '.join(STAGES)}")
    return stage
