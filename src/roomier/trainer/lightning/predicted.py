"""``trainer.predict_loop``, which prediction writers read, and the callback that updates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from roomier.api.callback import Callback
from roomier.api.lightning_callbacks import is_builtin
from roomier.callbacks.prediction_writer import PredictionWriter
from roomier.core.tree import map_tensors
from roomier.run.run import run_of

if TYPE_CHECKING:
    from roomier.api.module import Module
    from roomier.api.trainer_view import TrainerView


class PredictLoop:
    """State of a prediction on this rank, with Lightning's names. :class:`KeepsPredicted` updates this state.

    Attributes:
        current_batch_number: number of the current batch, counted over all ranks.
        current_batch_indices: dataset indices of the samples in the current batch. The list is empty if the loader is
            not a DataLoader that reads the dataset in order.
        epoch_batch_indices: dataset indices of the samples in each batch so far, as one list per loader.
        return_predictions: True if ``predict`` returns the predictions.
    """

    def __init__(self) -> None:
        self.current_batch_number = -1
        self.current_batch_indices: list[int] = []
        self.epoch_batch_indices: list[list[list[int]]] = []
        self.return_predictions = False
        self._predictions: list[list[Any]] = []

    @property
    def num_dataloaders(self) -> int:
        """Number of prediction loaders."""
        return len(self.epoch_batch_indices)

    @property
    def predictions(self) -> list[Any]:
        """Predictions for the batches of this rank, in host memory. With several loaders, the value is one list per
        loader.

        Predictions are stored only if a callback writes them at the end.
        """
        return self._predictions[0] if self.num_dataloaders == 1 else self._predictions

    def begin(self, num_loaders: int) -> None:
        """Start a prediction over ``num_loaders`` loaders."""
        self.epoch_batch_indices = [[] for _ in range(num_loaders)]
        self._predictions = [[] for _ in range(num_loaders)]

    def add(self, loader_number: int, number: int, indices: list[int], output: Any, *, is_kept: bool) -> None:
        """Add a batch.

        Args:
            loader_number: index of the loader.
            number: number of the batch, counted over all ranks.
            indices: dataset indices of the samples in the batch.
            output: prediction for the batch.
            is_kept: True to store the prediction.
        """
        self.current_batch_number, self.current_batch_indices = number, indices
        self.epoch_batch_indices[loader_number].append(indices)
        if is_kept:
            self._predictions[loader_number].append(map_tensors(lambda tensor: tensor.cpu(), output))


class KeepsPredicted(Callback):
    """Callback that updates ``trainer.predict_loop``. It must be the first callback in the list, so that writers read
    current values.

    Args:
        until_end: True to store the predictions for a callback that writes them at the end.
    """

    def __init__(self, *, until_end: bool) -> None:
        self._until_end = until_end

    def on_predict_start(self, trainer: TrainerView, pl_module: Module) -> None:
        trainer.predict_loop.begin(len(trainer.num_predict_batches))

    def on_predict_batch_end(
        self,
        trainer: TrainerView,
        pl_module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        loaders = trainer.predict_dataloaders
        loader = loaders[dataloader_idx] if isinstance(loaders, (list, tuple)) and _are_loaders(loaders) else loaders
        number = run_of(trainer, "predict_loop").now.batch_number
        indices = batch_indices(loader, number)
        trainer.predict_loop.add(dataloader_idx, number, indices, outputs, is_kept=self._until_end)


def writes_predictions(callback: Any) -> bool:
    """Return True if ``callback`` is a prediction writer from roomier or from Lightning."""
    return isinstance(callback, PredictionWriter) or is_builtin(callback, "BasePredictionWriter")


def writes_at_end(callback: Any) -> bool:
    """Return True if ``callback`` writes all predictions of a rank at the end of the prediction."""
    interval = callback.interval
    return "epoch" in str(getattr(interval, "value", interval))


def _are_loaders(loaders: Any) -> bool:
    return all(isinstance(each, DataLoader) for each in loaders)


def batch_indices(loader: Any, number: int) -> list[int]:
    """Return the dataset indices of the samples in batch ``number``, or ``[]`` if the loader does not read the dataset
    in order."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(sampler) is not BatchSampler:
        return []
    if type(sampler.sampler) is not SequentialSampler:
        return []
    start = number * sampler.batch_size
    return list(range(start, min(start + sampler.batch_size, len(sampler.sampler))))
