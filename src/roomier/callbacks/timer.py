"""Timer: how long the stages of a run took, and an end to training after a while."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from roomier.api.callback import Callback
from roomier.core.errors import RoomierError
from roomier.core.forms import fields, finite, mapping_of
from roomier.core.log import notice

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView

STAGES = ("train", "sanity_check", "validate", "test", "predict")


class Timer(Callback):
    """Measures stages, and ends training when ``duration`` is over. Arguments mean what they mean in Lightning.

    Unlike ``Trainer(max_time=...)`` it counts on in a resumed run: time in training before the checkpoint is spent.
    Of several ranks the first whose time is over ends training for all, at one step.

    Args:
        duration: of training: ``"DD:HH:MM:SS"``, a timedelta, or a dict of its arguments; None only measures.
        interval: when the time is looked at: after each ``"step"`` or each ``"epoch"``.
        verbose: say so on standard error when it ends training.

    Raises:
        RoomierError: an argument is wrong.
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise RoomierError("Timer(interval)", interval, "is not known", "Use 'step' or 'epoch'")
        self._duration_s = None if duration is None else _seconds(duration)
        self._interval = interval
        self._verbose = verbose
        self._started_s: dict[str, float | None] = dict.fromkeys(STAGES)
        self._ended_s: dict[str, float | None] = dict.fromkeys(STAGES)
        self._earlier_s = 0.0  # of training, before the checkpoint

    def start_time(self, stage: str = "train") -> float | None:
        """When a stage (``"train"``, ``"validate"``, ``"test"``, ``"predict"``, ``"sanity_check"``) began last, in
        seconds of a clock without an origin; None before."""
        return self._started_s[_stage(stage)]

    def end_time(self, stage: str = "train") -> float | None:
        """When it ended last, by the same clock."""
        return self._ended_s[_stage(stage)]

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds the stage took or is taking; of training, those before the checkpoint included."""
        started, ended = self.start_time(stage), self.end_time(stage)
        earlier = self._earlier_s if stage == "train" else 0.0
        if started is None:
            return earlier
        return earlier + (time.monotonic() if ended is None else ended) - started

    def time_remaining(self, stage: str = "train") -> float | None:
        """Seconds left of ``duration``; None without one."""
        return None if self._duration_s is None else self._duration_s - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        fields({}, others={"time_elapsed": mapping_of(finite)})(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._started_s["train"] is not None:  # a run that goes back: its time has passed all the same
            return
        self._earlier_s = float(state_dict.get("time_elapsed", {}).get("train", 0.0))

    def _start(self, stage: str) -> None:
        self._started_s[stage], self._ended_s[stage] = time.monotonic(), None

    def _end(self, stage: str) -> None:
        self._ended_s[stage] = time.monotonic()

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._started_s["train"] = self._ended_s["train"] = None

    def on_fit_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._look(trainer)  # a resumed run may have none left

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._start("train")

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._end("train")

    def on_sanity_check_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._start("sanity_check")

    def on_sanity_check_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._end("sanity_check")

    def on_validation_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._start("validate")

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._end("validate")

    def on_test_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._start("test")

    def on_test_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._end("test")

    def on_predict_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._start("predict")

    def on_predict_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._end("predict")

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._interval == "step":
            self._look(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._interval == "epoch":
            self._look(trainer)

    def _look(self, trainer: TrainerView) -> None:
        remaining_s = self.time_remaining()
        if remaining_s is None or remaining_s > 0 or trainer.should_stop:
            return
        trainer.should_stop = True
        if self._verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            notice(f"Timer: the time for training is over after {elapsed}, at step {trainer.global_step}")


def _stage(stage: str) -> str:
    if stage not in STAGES:
        raise RoomierError("Timer: stage", stage, "is not known", f"Use one of {', '.join(STAGES)}")
    return stage


def _seconds(duration: str | timedelta | dict[str, int]) -> float:
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if isinstance(duration, str):
        found = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration.strip())
        if found is not None:
            days, hours, minutes, seconds = map(int, found.groups())
            return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    elif isinstance(duration, dict):
        try:
            return timedelta(**duration).total_seconds()
        except TypeError:
            pass
    action = "Write 'DD:HH:MM:SS', a timedelta, or a dict such as {'hours': 2}"
    raise RoomierError("Timer(duration)", duration, "is not a duration", action)
