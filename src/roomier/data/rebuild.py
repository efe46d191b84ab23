"""A DataLoader with another sampler, dataset or pinning, and everything else as the user set it."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from roomier.core import torch_loaders
from roomier.data.sampler import OrderedSampler


def can_be_rebuilt(loader: DataLoader[Any]) -> bool:
    """Whether a copy with another sampler iterates by it: a subclass must leave the iteration to torch."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind.__len__ is DataLoader.__len__


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A copy of ``loader``, of its own class and with all its attributes, but for ``changes``.

    A shallow copy and not a call of the constructor: a subclass may take other arguments, and no argument can
    be forgotten. The user's loader stays as it is, its workers too.
    """
    copied = copy.copy(loader)
    torch_loaders.forget_iterator(copied)
    # torch refuses to set these on a finished loader, because workers may run: none do here.
    vars(copied).update(changes)
    return copied


def with_ordered_sampler(loader: DataLoader[Any], sampler: OrderedSampler, **changes: Any) -> DataLoader[Any]:
    """A copy of ``loader`` that batches the indices of ``sampler`` as it batched its own."""
    batching = loader.batch_sampler
    if batching is None:
        return rebuilt(loader, sampler=sampler, **changes)
    assert isinstance(batching, BatchSampler)
    batches = BatchSampler(sampler, batching.batch_size, batching.drop_last)
    return rebuilt(loader, sampler=sampler, batch_sampler=batches, **changes)


def plain_sampler(loader: DataLoader[Any]) -> RandomSampler | SequentialSampler | None:
    """torch's own sampler of ``loader`` if it visits each index once per epoch, batched by torch; else None."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            return None
        sampler = loader.batch_sampler.sampler
    # Exact types: a subclass may give any other order.
    if type(sampler) is SequentialSampler:
        return sampler
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return sampler
    return None


def parts_of(loader: object) -> Iterator[object]:
    """``loader`` and what it draws from: its dataset and its samplers; each object once."""
    seen: list[object] = [loader]
    if isinstance(loader, DataLoader):
        batching = loader.batch_sampler
        for part in (loader.dataset, loader.sampler, batching, getattr(batching, "sampler", None)):
            if part is not None and not any(part is other for other in seen):
                seen.append(part)
    yield from seen


def tell_epoch(loader: object, epoch: int, *, training: bool = True) -> None:
    """Call ``set_epoch(epoch)`` on ``loader``, its samplers and, in training, its dataset, where they have it.

    An evaluation may be over the data set that is trained on, in the middle of an epoch, which must not begin anew.
    """
    for part in parts_of(loader):
        if not training and part is getattr(loader, "dataset", None):
            continue
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def generators_of(loader: object) -> list[torch.Generator]:
    """The torch generators of ``loader``, its dataset and its samplers, each once."""
    found: list[torch.Generator] = []
    for part in parts_of(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is other for other in found):
            found.append(generator)
    return found
