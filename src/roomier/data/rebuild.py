"""Functions that copy a DataLoader with changed arguments or a changed batch size, and functions that return its
parts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from roomier.data import torch_loaders


def can_be_rebuilt(loader: DataLoader[Any]) -> bool:
    """Return True if a copy of ``loader`` with a different sampler uses the order of that sampler.

    The result is False for a subclass that overrides ``__iter__`` or ``__len__``.
    """
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind.__len__ is DataLoader.__len__


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` with the same class and attributes, except for ``changes``.

    The loader is copied and not constructed again, because a subclass can have different constructor arguments. A
    shallow copy preserves every argument. The user's loader and its workers are unchanged.
    """
    copied = copy.copy(loader)
    torch_loaders.forget_iterator(copied)
    # torch does not allow code to set these attributes on an initialized loader, because workers may be running. The
    # copy has no workers.
    vars(copied).update(changes)
    return copied


def with_sampler(loader: DataLoader[Any], sampler: Sampler[int], **changes: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` that reads the indices of ``sampler`` in batches of the same size."""
    batching = loader.batch_sampler
    if batching is None:
        return rebuilt(loader, sampler=sampler, **changes)
    assert isinstance(batching, BatchSampler)
    batches = BatchSampler(sampler, batching.batch_size, batching.drop_last)
    return rebuilt(loader, sampler=sampler, batch_sampler=batches, **changes)


def plain_sampler(loader: DataLoader[Any]) -> RandomSampler | SequentialSampler | None:
    """Return the sampler of ``loader``, or None if the dataset is iterable-style or the sampler is not a plain sampler
    of torch.

    A plain sampler visits each index once per epoch.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            return None
        sampler = loader.batch_sampler.sampler
    # Compare exact types, because a subclass can yield a different order.
    if type(sampler) is SequentialSampler:
        return sampler
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return sampler
    return None


def parts_of(loader: object) -> Iterator[object]:
    """Yield ``loader``, its dataset and its samplers, each object once."""
    parts = [loader]
    if isinstance(loader, DataLoader):
        batching = loader.batch_sampler
        parts += [loader.dataset, loader.sampler, batching, getattr(batching, "sampler", None)]
    yield from {id(part): part for part in parts if part is not None}.values()


def set_loader_epoch(loader: object, epoch: int, *, training: bool = True) -> None:
    """Call ``set_epoch(epoch)`` on ``loader``, its samplers and, in training, its dataset, if these objects have this
    method.

    An evaluation can use the training dataset in the middle of a training epoch, and must not restart this dataset.
    """
    for part in parts_of(loader):
        if not training and part is getattr(loader, "dataset", None):
            continue
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def generators_of(loader: object) -> list[torch.Generator]:
    """Return the torch generators of ``loader``, its dataset and its samplers, each once."""
    found = (getattr(part, "generator", None) for part in parts_of(loader))
    return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples per micro-batch, or None if this number cannot be changed.

    The number cannot be changed if code other than torch's samplers orders or groups the samples, for example if the
    items of the dataset are batches.
    """
    if not isinstance(loader, DataLoader) or not can_be_rebuilt(loader) or plain_sampler(loader) is None:
        return None
    batching = loader.batch_sampler
    return batching.batch_size if isinstance(batching, BatchSampler) else None


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """Return a copy of ``loader`` with ``batch_size`` samples per batch.

    Args:
        loader: DataLoader for which :func:`batch_size_of` is not None.
        batch_size: number of samples per micro-batch.
    """
    batching, sampler = loader.batch_sampler, plain_sampler(loader)
    assert isinstance(batching, BatchSampler)
    assert sampler is not None
    # If the user passed a batch sampler, loader.sampler is an unused default of torch.
    batches = BatchSampler(sampler, batch_size, batching.drop_last)
    changes = {"sampler": sampler, "batch_sampler": batches}
    return rebuilt(loader, **changes, batch_size=batch_size, drop_last=batching.drop_last)
