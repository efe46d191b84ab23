"""Reading the metric a callback watches, and telling what there is when it is not there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from roomier.core.errors import RoomierError, did_you_mean

if TYPE_CHECKING:
    from roomier.trainer import Trainer


def check_mode(mode: str) -> str:
    """``mode``, which is ``"min"`` (lower is better) or ``"max"``.

    Raises:
        RoomierError: it is neither.
    """
    if mode not in ("min", "max"):
        raise RoomierError("mode", mode, "is unknown", "Use 'min' (lower is better) or 'max'")
    return mode


def scalar(value: Tensor | float) -> float:
    """A metric of one element as a number; waits for the device it is on."""
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def missing_metric(callback: str, monitor: str, metrics: Mapping[str, object]) -> RoomierError:
    """The error for a metric that nobody logged, with the names of those that were."""
    if not metrics:
        problem, action = "nothing was logged yet", f"Call self.log({monitor!r}, value) in the module"
    else:
        problem = f"it was not logged; there are: {', '.join(sorted(metrics))}"
        action = f"{did_you_mean(monitor, metrics)} Or call self.log({monitor!r}, value) in the module"
    return RoomierError(f"{callback}(monitor)", monitor, problem, action)


def saves_or_checks_after_training_epoch(trainer: Trainer) -> bool:
    """Whether an epoch's metrics are complete at its end: nothing is validated, or validated at the end of each.

    With several validations an epoch, or not one in each, the end of a validation is the moment to look.
    """
    if sum(trainer.num_val_batches) == 0:
        return True
    interval = trainer.val_check_interval  # an integer counts batches, a float parts of an epoch
    is_at_epoch_end = interval is None or (isinstance(interval, float) and interval == 1.0)
    return is_at_epoch_end and trainer.check_val_every_n_epoch == 1
