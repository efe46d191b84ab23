"""The metric a callback watches: reading it, and telling what there is when it is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from roomier.core.errors import RoomierError, nearest
from roomier.core.log import notice

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView

_IS_MEANT = 0.75  # val_loss is not train_loss


class Monitored:
    """One logged metric, by name, in the eyes of one callback.

    Args:
        argument: of the callback, which names it.

    Attributes:
        was_validated: a validation has ended since the run began or was resumed; set by the callback.
    """

    def __init__(self, callback_name: str, name: str, argument: str = "monitor") -> None:
        if not isinstance(name, str) or not name:
            raise RoomierError(
                f"{callback_name}({argument})", name, "is not the name of a metric", "Use the name given to self.log"
            )
        self.callback_name = callback_name
        self.name = name
        self._argument = argument
        self.was_validated = False
        self._told = False

    def read(self, trainer: TrainerView) -> float | None:
        """Its latest value; None, told once, as long as the first validation may still log it.

        Raises:
            RoomierError: it was not logged.
        """
        metrics = trainer.callback_metrics
        if self.name in metrics:
            return scalar(metrics[self.name])
        if not self.was_validated and sum(trainer.num_val_batches) > 0:
            if not self._told:
                self._told = True
                until_then = "until then the name reads none" if self._argument == "filename" else "waiting for it"
                notice(f"{self.callback_name}: {self.name!r} is not logged before the first validation; {until_then}")
            return None
        problem = f"it was not logged; there are: {', '.join(sorted(metrics))}" if metrics else "nothing was logged yet"
        near = nearest(self.name, metrics, _IS_MEANT)
        action = f"Did you mean {near!r}? " if near else ""
        if not near and sum(trainer.num_val_batches) == 0:
            problem += "; there is no validation data"
            action += "Pass val_dataloaders to fit if validation_step logs it. "
        action += f"Call self.log({self.name!r}, value) in the module, or name another metric"
        raise RoomierError(f"{self.callback_name}({self._argument})", self.name, problem, action)


def check_mode(callback_name: str, mode: str) -> str:
    """``mode``, which is ``"min"`` (lower is better) or ``"max"``.

    Raises:
        RoomierError: it is neither.
    """
    if mode not in ("min", "max"):
        raise RoomierError(f"{callback_name}(mode)", mode, "is unknown", "Use 'min' (lower is better) or 'max'")
    return mode


def scalar(value: Tensor | float) -> float:
    """A metric of one element as a number; waits for the device it is on."""
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def is_complete_at_epoch_end(trainer: TrainerView) -> bool:
    """Whether an epoch's metrics are all there at its end: nothing is validated, or validated once, then.

    With several validations an epoch, or not one in each, the end of a validation is the moment to look.
    """
    if sum(trainer.num_val_batches) == 0:
        return True
    interval = trainer.val_check_interval  # an integer counts batches, a float parts of an epoch
    is_whole_epoch = interval is None or (isinstance(interval, float) and interval == 1.0)
    return is_whole_epoch and trainer.check_val_every_n_epoch == 1
