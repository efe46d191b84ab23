"""DataModule: a class that prepares data and provides its datasets and loaders."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sized
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from roomier.api.hparams import HasHyperParameters
from roomier.api.module_hooks import DataHooks
from roomier.api.provided import provided

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView


class DataModule(HasHyperParameters, DataHooks):
    """Base class for the data of a run. Pass an instance to the ``datamodule`` argument of ``fit`` and other methods.

    Override the methods that you need. The methods have the same names and order as in Lightning's
    ``LightningDataModule``. ``prepare_data`` runs in one process, for tasks such as downloads and tokenization.
    ``setup`` runs in each process. Hyperparameters are logged together with the hyperparameters of the module.

    Attributes:
        trainer: the last Trainer to which the DataModule was passed; None if the DataModule was not passed to a
            Trainer.
        name: name for user code. roomier does not use it.
        prepare_data_per_node: as in :class:`roomier.api.module_hooks.DataHooks`.

    Example:
        >>> class Numbers(roomier.DataModule):
        ...     def setup(self, stage):
        ...         self.dataset = TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
        ...
        ...     def train_dataloader(self):
        ...         return DataLoader(self.dataset, batch_size=32, shuffle=True)
        >>> roomier.Trainer(max_epochs=1).fit(model, datamodule=Numbers())
    """

    trainer: TrainerView | None = None
    name: str | None = None

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
        """Create a DataModule from datasets, or from lists or dicts of datasets.

        The training data is shuffled, unless it is an ``IterableDataset``.

        Args:
            batch_size: number of samples per batch. ``__init__`` receives this number and ``num_workers`` if it
                accepts them.
            num_workers: number of worker processes per loader.
            init_arguments: arguments of ``__init__``.
        """
        parameters = inspect.signature(cls).parameters
        accepts_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        datamodule = cls(
            **{name: size for name, size in sizes.items() if accepts_all or name in parameters}, **init_arguments
        )
        given = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for name, dataset in given.items():
            if dataset is not None:
                make = partial(_loaders, dataset, name == "train", batch_size=batch_size, num_workers=num_workers)
                setattr(datamodule, f"{name}_dataloader", make)
        return datamodule

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: str | torch.device | None = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create the DataModule from its hyperparameters in a checkpoint and restore the state that :meth:`state_dict`
        returned.

        Args:
            checkpoint_path: a checkpoint folder, or a Lightning ``.ckpt`` file.
            map_location: device of the tensors in the state. Default: the CPU.
            hparams_file: YAML file of hyperparameters, which replace the hyperparameters in the checkpoint.
            weights_only: has no effect, because roomier never executes code in a checkpoint.
            kwargs: arguments of ``__init__`` that replace stored arguments, or that are not stored.

        Raises:
            RoomierError: ``map_location`` is not an available device, or ``hparams_file`` cannot be read.
            CheckpointError: the checkpoint is damaged, or an argument of ``__init__`` is missing.

        Example:
            >>> data = Numbers.load_from_checkpoint("runs/version_0/checkpoints/last")
        """
        load = provided("load_datamodule")
        loaded: Self = load(cls, checkpoint_path, map_location, hparams_file=hparams_file, **kwargs)
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, excluding the position in the data, which roomier saves itself."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """Called if the run ends with ``exception``, before ``teardown``."""

    def __str__(self) -> str:
        """Return the sizes of the datasets, one line per kind of loader. As in Lightning, this creates the loaders."""
        names = {"Train": "train", "Validation": "val", "Test": "test", "Predict": "predict"}
        return os.linesep.join(f"{{{name} dataloader: {self._size(stage)}}}" for name, stage in names.items())

    def _size(self, stage: str) -> str:
        try:
            loaders = getattr(self, f"{stage}_dataloader")()
        except Exception:  # the method reads attributes that setup assigns
            return "None"
        if isinstance(loaders, DataLoader):
            return f"size={_num_samples(loaders)}"
        each = loaders.values() if isinstance(loaders, Mapping) else loaders or ()
        sizes = (f"{number}. size={_num_samples(loader)}" for number, loader in enumerate(each, start=1))
        return " ; ".join(sizes) or "None"


def _num_samples(loader: Any) -> int | str:
    dataset = getattr(loader, "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else "NA"


def _loaders(datasets: Any, is_for_training: bool, **options: Any) -> Any:
    if isinstance(datasets, Mapping):
        return {name: _loaders(each, is_for_training, **options) for name, each in datasets.items()}
    if isinstance(datasets, (list, tuple)) and all(isinstance(each, Dataset) for each in datasets):
        return [_loaders(each, is_for_training, **options) for each in datasets]
    return DataLoader(datasets, shuffle=is_for_training and not isinstance(datasets, IterableDataset), **options)
