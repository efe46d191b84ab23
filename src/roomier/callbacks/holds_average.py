"""Base class for callbacks that average weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roomier.api.callback import Callback
from roomier.core.errors import RoomierError
from roomier.techniques.optim.averaging import WeightAverage

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView


class HoldsAverage(Callback):
    """Callback that holds a :class:`WeightAverage`, which is created during a fit."""

    _average: WeightAverage | None = None

    @property
    def num_averaged(self) -> int:
        """Number of weight snapshots in the average."""
        return 0 if self._average is None else self._average.num_averaged

    def held_weights(self) -> list[Tensor]:
        """See :class:`roomier.api.callback.KeepsWeights`."""
        return [] if self._average is None else list(self._average.averages.values())

    def _swap(self, trainer: TrainerView) -> None:
        """Exchange the weights of the model with their average."""
        assert self._average is not None
        with torch.inference_mode(False):  # tensors created in inference mode cannot be used in training
            trainer.engine.settle()
            self._average.swap()
            trainer.engine.settle()

    @classmethod
    def _wrong(cls, field: str, received: object, problem: str, action: str) -> RoomierError:
        return RoomierError(f"{cls.__name__}({field})", received, problem, action)

    @classmethod
    def _check_function(cls, field: str, function: object) -> None:
        if function is not None and not callable(function):
            raise cls._wrong(field, function, "must be callable", "Pass a function as for torch's AveragedModel")
