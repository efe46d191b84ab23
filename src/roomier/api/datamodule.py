"""DataModule: everything about the data in one object."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from roomier.api.hparams import HasHyperParameters
from roomier.core.tree import to_device

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView


class DataModule(HasHyperParameters):
    """Override what you need; names and order are those of Lightning's ``LightningDataModule``.

    ``prepare_data`` runs on one process (download, tokenize), ``setup`` on each. Its hyperparameters are logged with
    those of the module.

    Attributes:
        trainer: the one it was given to last.
        prepare_data_per_node: whether ``prepare_data`` runs on one process of each machine (files are its own), or,
            where all of them see the same files, on one of all.
    """

    trainer: TrainerView | None = None
    name: str | None = None
    prepare_data_per_node: bool = True

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **init_arguments: Any,
    ) -> Self:
        """A DataModule around datasets (or lists and dicts of them); that for training is shuffled, unless it is an
        ``IterableDataset``."""
        datamodule = cls(**init_arguments)
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for name, dataset in given.items():
            if dataset is not None:
                make = partial(_loaders, dataset, name == "train", batch_size=batch_size, num_workers=num_workers)
                setattr(datamodule, f"{name}_dataloader", make)
        return datamodule

    def prepare_data(self) -> None: ...
    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        """A list of batches, an iterable of batches, or a ``DataLoader``."""
        return None

    def val_dataloader(self) -> Any:
        """As :meth:`train_dataloader`, or a list or dict of loaders."""
        return None

    def test_dataloader(self) -> Any:
        return None

    def predict_dataloader(self) -> Any:
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """As the hook of the same name of :class:`roomier.Module`, which it goes before where both are overridden."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the position in the data, which roomier keeps itself."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def on_exception(self, exception: BaseException) -> None:
        """The run ends with ``exception``; ``teardown`` follows."""


def _loaders(datasets: Any, is_for_training: bool, **options: Any) -> Any:
    if isinstance(datasets, Mapping):
        return {name: _loaders(each, is_for_training, **options) for name, each in datasets.items()}
    if isinstance(datasets, (list, tuple)) and all(isinstance(each, Dataset) for each in datasets):
        return [_loaders(each, is_for_training, **options) for each in datasets]
    return DataLoader(datasets, shuffle=is_for_training and not isinstance(datasets, IterableDataset), **options)
