"""EarlyStopping: callback that stops a run if a metric stops improving, reaches a threshold, or diverges."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.monitored import ChecksMetric, Monitored, check_mode
from roomier.core.errors import RoomierError, check_integer
from roomier.core.forms import anything, count, fields, tensor
from roomier.core.keywords import explain_unknown_keywords
from roomier.core.log import notice


class EarlyStoppingReason(Enum):
    """Reason why :class:`EarlyStopping` stopped a run."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(ChecksMetric):
    """Callback that stops training if a monitored metric stops improving. The arguments have the same meaning as in
    Lightning.

    At each check, the callback compares ``monitor`` with its best value and with the thresholds. If one of the
    conditions below is met, it sets ``trainer.should_stop``, which ends the run.

    Args:
        monitor: the logged metric.
        min_delta: smallest change that counts as an improvement.
        patience: number of consecutive checks without an improvement after which the run stops.
        verbose: if True, print each improvement, and the reason for the stop, to standard error.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher values are better.
        strict: if True, raise an error if the metric was not logged; otherwise skip that check.
        check_finite: if True, stop the run if the metric is NaN or infinite.
        stopping_threshold: stop the run if the metric is better than this value.
        divergence_threshold: stop the run if the metric is worse than this value.
        check_on_train_epoch_end: check at the end of a training epoch (True) or of a validation (False). The default is
            the end of the epoch, unless an epoch has several validations or validation does not run in every epoch.
        log_rank_zero_only: if True, ``verbose`` prints only on the first rank.

    Attributes:
        best_score: best value so far (0-dim tensor); infinite before the first check.
        wait_count: number of consecutive checks without an improvement.
        stopped_epoch: epoch in which the callback stopped the run; 0 if the callback did not stop the run.
        stopping_reason: reason for the stop as an :class:`EarlyStoppingReason`.
        stopping_reason_message: reason for the stop as text; None if the callback did not stop the run.

    Raises:
        RoomierError: an argument is invalid. With ``strict``, the error is also raised at a check if the metric was not
            logged.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[EarlyStopping("val_loss", patience=5)])
    """

    reads_parameters = False

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
        check_integer("EarlyStopping(patience)", patience, 0, "Set it to a number of checks")
        if not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            field, problem = "EarlyStopping(min_delta)", "must be finite and non-negative"
            raise RoomierError(field, min_delta, problem, "Use a number such as 0.001")
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
        super().setup(trainer, pl_module, stage)
        if self._is_fitting:
            self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    def _check(self, trainer: TrainerView) -> None:
        if trainer.fast_dev_run:
            return
        if not self.strict and self.monitor not in trainer.callback_metrics:
            self._print(trainer, f"{self.monitor!r} was not logged, so this check is skipped")
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
            self._print(trainer, message)

    def _judge(self, current: float, dtype: torch.dtype) -> tuple[EarlyStoppingReason, str | None]:
        """Compare ``current`` with the best value. Return the reason to stop (or NOT_STOPPED) and a message to print.

        Args:
            dtype: dtype of the metric, to which thresholds are also rounded. Without this rounding, a float32 metric of
                0.35 would be better than a threshold of 0.35, because 0.35 in float32 is slightly less than the Python
                float 0.35.
        """

        def rounded(value: float) -> float:
            return torch.tensor(value, dtype=torch.promote_types(dtype, torch.float32)).item()

        sign = 1.0 if self.mode == "min" else -1.0  # lower values of sign * value are better
        now, best = sign * rounded(current), self.best_score.item()
        value = f"{self.monitor} = {current:.6g}"
        if self.check_finite and not math.isfinite(current):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{value} is not finite; the best value was {best:.6g}"
        if self.stopping_threshold is not None and now < sign * rounded(self.stopping_threshold):
            return EarlyStoppingReason.STOPPING_THRESHOLD, f"{value} is better than {self.stopping_threshold}"
        if self.divergence_threshold is not None and now > sign * rounded(self.divergence_threshold):
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, f"{value} is worse than {self.divergence_threshold}"
        if rounded(now + rounded(self.min_delta)) < sign * rounded(best):
            self.best_score = torch.tensor(current, dtype=torch.float64)
            self.wait_count = 0
            return EarlyStoppingReason.NOT_STOPPED, f"{value} is the new best value; the previous best was {best:.6g}"
        self.wait_count += 1
        if self.wait_count >= self.patience:
            message = f"{value}: {self.wait_count} consecutive checks without an improvement over {best:.6g}"
            return EarlyStoppingReason.PATIENCE_EXHAUSTED, message
        return EarlyStoppingReason.NOT_STOPPED, None

    def _print(self, trainer: TrainerView, message: str) -> None:
        if self.verbose and (trainer.is_global_zero or not self.log_rank_zero_only):
            notice(f"{type(self).__name__}: {message}")
