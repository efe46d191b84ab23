"""Metric that a callback monitors, with an error message for a metric that was not logged, and the hooks that check
it or require a logger."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.errors import RoomierError, nearest
from roomier.core.log import notice

_SIMILAR = 0.75  # Minimum similarity of names; with this value, val_loss does not match train_loss.


class Monitored:
    """Logged metric that a callback monitors.

    Args:
        callback_name: name of the callback's class, for messages.
        name: name of the metric.
        argument: argument of the callback that contains the name of the metric.

    Attributes:
        was_validated: True if a validation has ended since the run started or resumed. The callback sets this
            attribute.

    Raises:
        RoomierError: the name is not a string or is empty.
    """

    def __init__(self, callback_name: str, name: str, argument: str = "monitor") -> None:
        if not isinstance(name, str) or not name:
            raise RoomierError(
                f"{callback_name}({argument})", name, "must be the name of a metric", "Use a name passed to self.log"
            )
        self.callback_name = callback_name
        self.name = name
        self._argument = argument
        self.was_validated = False
        self._is_noticed = False

    def read(self, trainer: TrainerView) -> float | None:
        """Return the latest value of the metric. If the metric was not logged before the first validation, print one
        notice and return None.

        Raises:
            RoomierError: the metric was not logged, although a validation has ended or the run has no validation.
        """
        metrics = trainer.callback_metrics
        if self.name in metrics:
            return scalar(metrics[self.name])
        if not self.was_validated and sum(trainer.num_val_batches) > 0:
            if not self._is_noticed:
                self._is_noticed = True
                problem = f"{self.name!r} is not logged before the first validation and is not used until then"
                notice(f"{self.callback_name}: {problem}")
            return None
        problem = f"was not logged; logged metrics: {', '.join(sorted(metrics))}" if metrics else "was not logged"
        near = nearest(self.name, metrics, _SIMILAR)
        action = f"Did you mean {near!r}? " if near else ""
        if not near and sum(trainer.num_val_batches) == 0:
            problem += "; the run has no validation data"
            action += "Pass val_dataloaders to fit if validation_step logs it. "
        action += f"Call self.log({self.name!r}, value) in the module, or use the name of another metric"
        raise RoomierError(f"{self.callback_name}({self._argument})", self.name, problem, action)

    def report_missing(self, trainer: TrainerView) -> None:
        """Print a notice once if a metric in a checkpoint name is not available."""
        metrics = trainer.callback_metrics
        if self.name in metrics or self._is_noticed:
            return
        self._is_noticed = True
        near = nearest(self.name, metrics, _SIMILAR)
        question = f". Did you mean {near!r}?" if near else ""
        problem = f"the metric {self.name!r} is not available, so names contain {self.name + '=none'!r}{question}"
        notice(f"{self.callback_name}({self._argument}): {problem}")


def check_mode(callback_name: str, mode: str) -> str:
    """Return ``mode`` if it is ``"min"`` (lower is better) or ``"max"`` (higher is better).

    Raises:
        RoomierError: ``mode`` has another value.
    """
    if mode not in ("min", "max"):
        raise RoomierError(f"{callback_name}(mode)", mode, "must be 'min' or 'max'", "Use 'min' if lower is better")
    return mode


def scalar(value: Tensor | float) -> float:
    """Convert a metric with one element to a Python float. If ``value`` is a tensor, wait for its device."""
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def acts_at_epoch_end(given: bool | None, trainer: TrainerView) -> bool:
    """Return ``given`` or, if ``given`` is None, whether all metrics of an epoch are available when the training epoch
    ends.

    All metrics are available if there is no validation, or if the only validation of each epoch is at the end of the
    epoch. Otherwise, callbacks check metrics at the end of a validation.
    """
    if given is not None or sum(trainer.num_val_batches) == 0:
        return given is not False
    interval = trainer.val_check_interval  # A number of batches (int), a fraction of an epoch (float), or a time
    is_whole_epoch = interval is None or (isinstance(interval, float) and interval == 1.0)
    return is_whole_epoch and trainer.check_val_every_n_epoch == 1


class RequiresLogger(Callback):
    """Base class of callbacks that write rows of their own in a fit."""

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit" and not trainer.loggers and not trainer.fast_dev_run:
            action = "Remove logger=False, or remove this callback"
            raise RoomierError("callbacks", type(self).__name__, "requires a logger", action)


class ChecksMetric(Callback, ABC):
    """Base class of callbacks that check a metric after each validation, or after each training epoch if all metrics of
    an epoch are available then. Subclasses define ``_check``.

    Attributes:
        check_on_train_epoch_end: check at the end of a training epoch (True) or of a validation (False). With None,
            :func:`acts_at_epoch_end` decides.
    """

    reads_parameters = False

    monitors = True

    check_on_train_epoch_end: bool | None = None
    _monitored: Monitored
    _is_fitting = False

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._is_fitting = stage == "fit"

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._is_fitting and not trainer.sanity_checking:
            self._monitored.was_validated = True
            if not acts_at_epoch_end(self.check_on_train_epoch_end, trainer):
                self._check(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if acts_at_epoch_end(self.check_on_train_epoch_end, trainer):
            self._check(trainer)

    @abstractmethod
    def _check(self, trainer: TrainerView) -> None:
        """Read the metric, and act on it."""
