"""EarlyStopping: end a run whose metric no longer improves, has reached its goal, or went astray."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roomier.api.callback import Callback
from roomier.callbacks.monitored import Monitored, check_mode, is_complete_at_epoch_end
from roomier.core.errors import RoomierError
from roomier.core.forms import anything, count, fields, tensor
from roomier.core.keywords import explain_unknown_keywords
from roomier.core.log import notice

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView


class EarlyStoppingReason(Enum):
    """Why :class:`EarlyStopping` ended a run."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Looks at ``monitor`` at each check and sets ``trainer.should_stop``. Arguments mean what they mean in Lightning.

    Args:
        monitor: the logged metric.
        min_delta: an improvement is a change for the better by more than this.
        patience: that many checks in a row without an improvement end the run.
        verbose: tell each improvement, and why the run ended, on standard error.
        mode: ``"min"`` or ``"max"``: which values are better.
        strict: a metric that was not logged is an error; else that check is left out.
        check_finite: NaN and infinity end the run.
        stopping_threshold: a value better than this ends the run.
        divergence_threshold: a value worse than this ends the run.
        check_on_train_epoch_end: check at the end of a training epoch (True) or of a validation (False); by default at
            the epoch's end unless an epoch has several validations, or not every one has one.
        log_rank_zero_only: with ``verbose``, only the first rank tells.

    Attributes:
        best_score: the best value so far (0-dim tensor); infinitely bad before the first.
        wait_count: checks since the last improvement.
        stopped_epoch: the epoch in which it ended the run; 0 if it did not.
        stopping_reason, stopping_reason_message: why it ended the run.

    Raises:
        RoomierError: an argument is wrong; at a check, with ``strict``, that the metric was not logged.
    """

    monitors = True

    @explain_unknown_keywords("callbacks.EarlyStopping")
    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        self._monitored = Monitored(type(self).__name__, monitor)
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 0:
            raise _wrong("patience", patience, "is not a number of checks", "Use an integer of 0 or more")
        if not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise _wrong("min_delta", min_delta, "is not a size of a change", "Use a finite number of 0 or more")
        self.monitor = monitor
        self.min_delta = float(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.mode = check_mode(type(self).__name__, mode)
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only
        self.best_score: Tensor = torch.tensor(math.inf if mode == "min" else -math.inf, dtype=torch.float64)
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._is_fitting = False

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{ {'monitor': self.monitor, 'mode': self.mode}!r}"

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": self.best_score,
            "patience": self.patience,
        }

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        form = {"wait_count": count, "stopped_epoch": count, "best_score": tensor(shape=()), "patience": count}
        fields(form, others=anything)(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = state_dict["best_score"].cpu()
        self.patience = state_dict["patience"]

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._is_fitting = stage == "fit"
        if self._is_fitting:
            self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._is_fitting and not trainer.sanity_checking:
            self._monitored.was_validated = True
            if not self._checks_after_training_epoch(trainer):
                self._check(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._checks_after_training_epoch(trainer):
            self._check(trainer)

    def _checks_after_training_epoch(self, trainer: TrainerView) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        return is_complete_at_epoch_end(trainer)

    def _check(self, trainer: TrainerView) -> None:
        if trainer.fast_dev_run:
            return
        if not self.strict and self.monitor not in trainer.callback_metrics:
            self._tell(trainer, f"{self.monitor!r} was not logged; this check is left out")
            return
        current = self._monitored.read(trainer)
        if current is None:
            return
        metric: Any = trainer.callback_metrics[self.monitor]
        reason, message = self._judge(current, metric.dtype if isinstance(metric, Tensor) else torch.float64)
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            trainer.should_stop = True
            self.stopping_reason = reason
            self.stopped_epoch = trainer.current_epoch
            self.stopping_reason_message = message
        if message:
            self._tell(trainer, message)

    def _judge(self, current: float, dtype: torch.dtype) -> tuple[EarlyStoppingReason, str | None]:
        """Take in one value; returns whether to stop, and what there is to say.

        Args:
            dtype: of the metric: 0.35 in float32 is less than 0.35, and still no better than a threshold of 0.35.
        """

        def rounded(value: float) -> float:
            return torch.tensor(value, dtype=torch.promote_types(dtype, torch.float32)).item()

        sign = 1.0 if self.mode == "min" else -1.0  # in sign * value, lower is better
        now, best = sign * rounded(current), self.best_score.item()
        value = f"{self.monitor} = {current:.6g}"
        if self.check_finite and not math.isfinite(current):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{value} is not finite; the best was {best:.6g}"
        if self.stopping_threshold is not None and now < sign * rounded(self.stopping_threshold):
            return EarlyStoppingReason.STOPPING_THRESHOLD, f"{value} is better than {self.stopping_threshold}"
        if self.divergence_threshold is not None and now > sign * rounded(self.divergence_threshold):
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, f"{value} is worse than {self.divergence_threshold}"
        if rounded(now + rounded(self.min_delta)) < sign * rounded(best):
            self.best_score = torch.tensor(current, dtype=torch.float64)
            self.wait_count = 0
            return EarlyStoppingReason.NOT_STOPPED, f"{value} is the new best; it was {best:.6g}"
        self.wait_count += 1
        if self.wait_count >= self.patience:
            message = f"{value} is the last of {self.wait_count} checks without an improvement over {best:.6g}"
            return EarlyStoppingReason.PATIENCE_EXHAUSTED, message
        return EarlyStoppingReason.NOT_STOPPED, None

    def _tell(self, trainer: TrainerView, message: str) -> None:
        if self.verbose and (trainer.is_global_zero or not self.log_rank_zero_only):
            notice(f"{type(self).__name__}: {message}")


def _wrong(field: str, received: object, problem: str, action: str) -> RoomierError:
    return RoomierError(f"EarlyStopping({field})", received, problem, action)
