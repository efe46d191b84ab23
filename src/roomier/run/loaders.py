"""The data of a run as sources, which are created from the user's arguments, the DataModule or the module."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any

import torch

from roomier.api.datamodule import DataModule
from roomier.api.lightning_module import LightningAdapter
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.data.combined import CombinedLoader, as_loaders, training_loader
from roomier.data.first_batch import first_batch
from roomier.data.loaders import list_of_set
from roomier.data.peers import check_peer_lengths
from roomier.data.rebuild import batch_size_of, with_batch_size
from roomier.data.source import Source, check_counts
from roomier.run.options import LoopOptions


class RunLoaders:
    """The loaders of a run. Each loader is created when it is first used.

    Args:
        module: the module whose ``*_dataloader`` methods are used if neither loaders nor a DataModule are passed.
        loaders: the loaders that the user passed, with the keys ``"train"``, ``"val"``, ``"test"``, ``"predict"``.
        datamodule: the DataModule of the call, or None.
        options: settings that contain the limits on batches.
        ranks: the ranks of the run.
        pins: True to copy batches to pinned memory.

    Attributes:
        found: the loaders that were used, in the form in which they were passed or defined.
        ranks: the ranks of the run. Their final arrangement is set before a source is created.
        num_in_round: number of samples in a training micro-batch of all ranks, set by :meth:`set_batch_size`; None if
            each rank has the same number.
    """

    def __init__(
        self,
        module: Module,
        loaders: Mapping[str, Any],
        datamodule: DataModule | None,
        options: LoopOptions,
        ranks: Ranks,
        *,
        pins: bool = False,
    ) -> None:
        self.found: dict[str, Any] = {}
        self._module = module
        self._datamodule = datamodule
        self._options = options
        self.ranks = ranks
        self._loaders = loaders
        self._train_loader: Any = None
        self._set_batch_size: int | None = None
        self.num_in_round: int | None = None
        self._train: Source | None = None
        self._sources: list[Source] = []
        self._num_training_batches: float | None = None
        self._pins = pins

    @property
    def train_loader(self) -> Any:
        """The loader of the training data.

        Raises:
            DataError: there is no training data.
        """
        if self._train_loader is None:
            name = "train_dataloaders"
            loader = self._find("train")
            if loader is None:
                raise DataError(name, None, "training requires data", "Pass it to fit, or define train_dataloader")
            self._train_loader = training_loader(loader, name)
            if self._set_batch_size is not None:
                self._train_loader = with_batch_size(self._train_loader, self._set_batch_size)
        return self._train_loader

    def reload(self) -> bool:
        """Discard the loaders that methods of the module or the DataModule created, so that they are created again.

        Returns:
            False if the training and validation loaders were passed as arguments, because these objects do not change.
        """
        if all(self._loaders.get(name) is not None for name in ("train", "val")):
            return False
        self.end()
        self._train_loader = self._train = self._num_training_batches = None
        self._sources.clear()
        return True

    @property
    def batch_size(self) -> int | None:
        """Number of samples per micro-batch on each rank; None if roomier cannot change this number."""
        return batch_size_of(self.train_loader)

    def first_batch(self) -> Any:
        """Return a batch of the training data without consuming it. Call this method before ``train_source`` is used.

        Raises:
            DataError: no batch is available, or reading a batch would change the data that the run reads.
        """
        assert self._train is None
        batch, self._train_loader = first_batch(self.train_loader, "train_dataloaders")
        return batch

    def set_batch_size(self, batch_size: int, num_in_round: int | None = None) -> None:
        """Set the largest number of samples in a training micro-batch of a rank, and :attr:`num_in_round`. Call this
        method before ``train_source`` is used."""
        assert self._train is None
        self._train_loader = with_batch_size(self.train_loader, batch_size)
        self._set_batch_size, self.num_in_round = batch_size, num_in_round

    @property
    def train_source(self) -> Source:
        """The training data as a source, which is created at the first access."""
        if self._train is None:
            self._train = Source(
                self.train_loader,
                name="train_dataloaders",
                seed=torch.initial_seed() % 2**63,
                ranks=self.ranks.data,
                draws_order=isinstance(self._module, LightningAdapter),
                allows_empty=isinstance(self._module, LightningAdapter),  # a fit of Lightning then ends without a step
                shuffle_allowed=not self._options.overfit_batches,
                pin_memory=self._pins,
                num_in_round=self.num_in_round,
            )
            self._sources.append(self._train)
        return self._train

    def count_training_batches(self) -> float:
        """Return the number of training batches per epoch on each rank: the minimum over all ranks."""
        if self._num_training_batches is None:
            source, limit = self.train_source, partial(self._options.limit_batches, "train")
            if source.follow_each_other:  # the limit applies to each part
                source.limit_parts([limit(length) for length in source.part_lengths])
                num_batches = source.num_batches
            else:
                num_batches = limit(source.num_batches)
            self._num_training_batches = min(self.ranks.gather(num_batches))
            if not self.ranks.peers.is_alone:
                check_peer_lengths(self.ranks, source.loader, source.name)
        return self._num_training_batches

    def evaluation(self, name: str, *, shuffle_allowed: bool = True) -> tuple[list[Source], list[float]]:
        """Return the sources of ``"val"``, ``"test"`` or ``"predict"`` and their limits, in batches of all ranks.

        Args:
            shuffle_allowed: if False, read a loader with ``shuffle=True`` in sequential order.

        Raises:
            DataError: no data is available, or a loader of ``"predict"`` combines batches of several loaders.
        """
        options, field = self._options, f"{name}_dataloaders"
        if getattr(options, f"limit_{name}_batches") == 0:
            return [], []
        ranks = self.ranks
        seed = ranks.peers.from_zero(torch.initial_seed() % 2**63)
        loaders = as_loaders(self._find(name), field)
        check_counts(ranks.gather(len(loaders)), field, loaders)
        for loader in () if ranks.peers.is_alone else loaders:
            check_peer_lengths(ranks, loader, field)
        if name == "predict":
            for loader in loaders:
                _check_is_predicted(loader, field)
        sources = [
            Source(
                loader,
                name=field,
                seed=seed,
                ranks=ranks.data,
                shuffle_allowed=shuffle_allowed,
                training=False,
                pin_memory=self._pins,
            )
            for loader in loaders
        ]
        self._sources += sources
        return sources, [options.limit_batches(name, source.num_batches) for source in sources]

    def end(self) -> None:
        """Stop the worker processes of all loaders from which data was read."""
        for source in self._sources:
            source.end()

    def _find(self, name: str) -> Any:
        found = self._loaders.get(name)
        if found is None:
            data = self._datamodule
            if data is None:
                found = getattr(self._module, f"{name}_dataloader")()
            elif overrides(data, f"{name}_dataloader", DataModule):  # Lightning's default raises an error
                found = getattr(data, f"{name}_dataloader")()
        self.found[name] = found
        return list_of_set(found, f"{name}_dataloaders", self.ranks) if isinstance(found, Set) else found


def _check_is_predicted(loader: Any, name: str) -> None:
    if isinstance(loader, CombinedLoader):
        problem = f"combines batches of several loaders ({loader.mode!r}), but predict supports one loader per batch"
        raise DataError(name, loader, problem, "Use CombinedLoader(loaders, 'sequential'), or pass a list of loaders")
