"""Numbers of batches and metrics that a progress bar shows, with Lightning's names."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView


class BatchCounts:
    """Numbers of batches in the current Trainer call. An unknown number is infinite, and all numbers are 0 before the
    first call.
    """

    _shown_trainer: TrainerView | None = None

    @property
    def trainer(self) -> TrainerView:
        """The Trainer of the last call.

        Raises:
            TypeError: the bar has not been used yet, as in Lightning.
        """
        if self._shown_trainer is None:
            raise TypeError(f"The `{type(self).__name__}._trainer` reference has not been set yet.")
        return self._shown_trainer

    @property
    def total_train_batches(self) -> float:
        """Number of training batches per epoch."""
        return 0 if self._shown_trainer is None else self._shown_trainer.num_training_batches

    @property
    def total_val_batches(self) -> float:
        """Number of validation batches of all loaders; 0 in an epoch without validation."""
        trainer = self._shown_trainer
        every = 1 if trainer is None else trainer.check_val_every_n_epoch
        is_validated = trainer is not None and (every is None or (trainer.current_epoch + 1) % every == 0)
        return sum(trainer.num_val_batches) if trainer is not None and is_validated else 0

    def get_metrics(self, trainer: TrainerView, pl_module: Any) -> dict[str, Any]:
        """Return the values to show, by name. Override this method to add, change or remove values."""
        return dict(trainer.progress_bar_metrics)


def shown_numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numeric values in ``metrics`` as Python floats."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (Real, Tensor))}
