"""``trainer.predict_loop``: what a prediction writer asks, and what keeps it."""

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
    """What ``predict`` has done so far on this rank, under Lightning's names; filled by :class:`KeepsPredicted`.

    Attributes:
        current_batch_number: of the batch at hand, among those of all ranks.
        current_batch_indices: places of the samples of the batch at hand in its data set; empty where they are not
            known: the loader is no DataLoader that reads in order.
        epoch_batch_indices: those of each batch so far, a list a loader.
        return_predictions: whether ``predict`` returns what it predicts.
    """

    def __init__(self) -> None:
        self.current_batch_number = -1
        self.current_batch_indices: list[int] = []
        self.epoch_batch_indices: list[list[list[int]]] = []
        self.return_predictions = False
        self._predictions: list[list[Any]] = []

    @property
    def num_dataloaders(self) -> int:
        return len(self.epoch_batch_indices)

    @property
    def predictions(self) -> list[Any]:
        """Of each batch of this rank, in host memory; with several loaders a list for each. Kept for those who write
        them at the end."""
        return self._predictions[0] if self.num_dataloaders == 1 else self._predictions

    def begin(self, num_loaders: int) -> None:
        self.epoch_batch_indices = [[] for _ in range(num_loaders)]
        self._predictions = [[] for _ in range(num_loaders)]

    def add(self, loader_number: int, number: int, indices: list[int], output: Any, *, is_kept: bool) -> None:
        self.current_batch_number, self.current_batch_indices = number, indices
        self.epoch_batch_indices[loader_number].append(indices)
        if is_kept:
            self._predictions[loader_number].append(map_tensors(lambda tensor: tensor.cpu(), output))


class KeepsPredicted(Callback):
    """Fills ``trainer.predict_loop`` before a writer asks it: it must come first among the callbacks.

    Args:
        until_end: keep the predictions for who writes them when all are there.
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
    """Whether it asks ``trainer.predict_loop``: a PredictionWriter, or what is made from Lightning's base of them."""
    return isinstance(callback, PredictionWriter) or is_builtin(callback, "BasePredictionWriter")


def writes_at_end(callback: Any) -> bool:
    """Whether it wants all predictions of a rank at once."""
    interval = callback.interval
    return "epoch" in str(getattr(interval, "value", interval))


def _are_loaders(loaders: Any) -> bool:
    return all(isinstance(each, DataLoader) for each in loaders)


def batch_indices(loader: Any, number: int) -> list[int]:
    """Places in the data set of the samples of the batch of that number; ``[]`` where the loader does not read in
    order."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or type(sampler) is not BatchSampler:
        return []
    if type(sampler.sampler) is not SequentialSampler:
        return []
    start = number * sampler.batch_size
    return list(range(start, min(start + sampler.batch_size, len(sampler.sampler))))
