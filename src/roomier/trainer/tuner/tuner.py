"""The Tuner class, which provides both searches under the names that Lightning uses."""

from __future__ import annotations

from typing import Any

from torch import nn

from roomier.api.datamodule import DataModule
from roomier.core.errors import RoomierError
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.tuner.batch_size import scale_batch_size
from roomier.trainer.tuner.range_test import LearningRateCurve, Mode, lr_find


class Tuner:
    """Finds a learning rate or a batch size for the fits of ``trainer``.

    Args:
        trainer: the Trainer whose next fits use the results.

    Example:
        >>> tuner = Tuner(trainer)
        >>> tuner.lr_find(model, loader)
        >>> trainer.fit(model, loader)
    """

    def __init__(self, trainer: TrainerAttributes) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: Mode = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateCurve | None:
        """Search for a learning rate. See :func:`roomier.tuner.lr_find`. ``val_dataloaders`` is ignored."""
        _check_method(method, dataloaders)
        return lr_find(
            self._trainer,
            model,
            train_dataloaders,
            datamodule=datamodule,
            min_lr=min_lr,
            max_lr=max_lr,
            num_training=num_training,
            mode=mode,
            early_stop_threshold=early_stop_threshold,
            update_attr=update_attr,
            attr_name=attr_name,
        )

    def scale_batch_size(
        self,
        model: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.0,
        max_val: int = 8192,
        memory_budget: int | str | None = None,
    ) -> int | None:
        """Search for a batch size. See :func:`roomier.tuner.scale_batch_size`.

        The search does not change any attribute of the model, so ``batch_arg_name`` is ignored.
        """
        _check_method(method, dataloaders)
        return scale_batch_size(
            self._trainer,
            model,
            train_dataloaders,
            datamodule=datamodule,
            mode=mode,
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
            margin=margin,
            max_val=max_val,
            memory_budget=memory_budget,
        )


def _check_method(method: str, dataloaders: Any) -> None:
    if method != "fit" or dataloaders is not None:
        action = (
            "Pass train_dataloaders or a datamodule. For an evaluation, set the batch size in the evaluation loader"
        )
        raise RoomierError("method", method, "must be 'fit', because only training steps are tried", action)
