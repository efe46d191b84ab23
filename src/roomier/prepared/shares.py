"""Shares of a loader: the samples or batches that each rank reads.

All ranks read the same number of full batches. The samples or batches that the ranks read in one step are a round. As
in Accelerate, the first samples of the epoch fill an incomplete last round. At the end of the epoch, the number of
samples in this round that are not repeated is known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, IterableDataset, Sampler

from roomier.core.world import World

T = TypeVar("T")


class Round:
    """Division of a stream of items into rounds. Each rank reads a part of each round.

    Args:
        world: rank and number of ranks.
        size: number of items per rank in each round.
        completes: True to fill an incomplete last round with the first items; False to drop an incomplete round.

    Attributes:
        num_real: number of items in an incomplete last round before it is filled, over all ranks; 0 if the last round
            was full.
    """

    def __init__(self, world: World, size: int, *, completes: bool) -> None:
        self._size = size
        self._num_all = size * world.size
        self._own = slice(world.rank * size, (world.rank + 1) * size)
        self._completes = completes
        self.num_real = 0

    def shares(self, items: Iterable[T]) -> Iterator[list[T]]:
        """Yield the items of this rank in each round."""
        self.num_real = 0
        stream = iter(items)
        first: list[T] = []
        while items_of_round := list(islice(stream, self._num_all)):
            first = first or items_of_round
            num_found = len(items_of_round)
            if num_found < self._num_all:
                if not self._completes:
                    return
                self.num_real = num_found
                while len(items_of_round) < self._num_all:
                    items_of_round += first[: self._num_all - len(items_of_round)]
            yield items_of_round[self._own]

    def count(self, num_items: int) -> int:
        """Return the number of rounds into which ``num_items`` items are divided."""
        return -(-num_items // self._num_all) if self._completes else num_items // self._num_all


class ShardedBatches(Sampler[list[Any]]):
    """Batches of indices that this rank reads.

    The indices of torch's ``BatchSampler`` are divided into rounds of one batch per rank. The batches of any other
    sampler remain unchanged, because their samples can belong together. In this case, each rank reads every N-th batch.

    Args:
        batches: sampler of the full batches, for all ranks.
        world: rank and number of ranks.
        splits: if True, divide each batch among the ranks, instead of reading one batch per rank.

    Attributes:
        sampler: sampler of ``batches``.
        batch_size: number of samples per batch of this rank; None if ``batches`` is not torch's ``BatchSampler``.
        drop_last: True to drop an incomplete last round.
    """

    def __init__(self, batches: Any, world: World, *, splits: bool) -> None:
        self._batches = batches
        self.sampler = getattr(batches, "sampler", batches)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self._is_plain = type(batches) is BatchSampler
        self.batch_size: int | None = None
        if self._is_plain:
            self.batch_size = batches.batch_size // world.size if splits else batches.batch_size
        self._num_samples = self.batch_size or 1
        self._round = Round(world, self._num_samples, completes=not self.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        if self._is_plain:
            yield from self._round.shares(index for batch in self._batches for index in batch)
        else:
            for [batch] in self._round.shares(self._batches):
                yield batch

    def __len__(self) -> int:
        if not self._is_plain:
            return self._round.count(len(self._batches))
        return self._round.count(len(self._batches) * self._batches.batch_size - self._num_missing())

    def _num_missing(self) -> int:
        """Return the number of samples missing from an incomplete last batch."""
        return 0 if self.drop_last else -len(self.sampler) % int(self._batches.batch_size)

    def num_kept(self, num_rows: int, num_ranks: int) -> int:
        """Return how many of ``num_rows`` gathered rows of the last round are not repeated."""
        if not self._round.num_real:
            return num_rows
        return self._round.num_real if self._is_plain else num_rows * self._round.num_real // num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the sampler of the full batches."""
        set_epoch = getattr(self._batches, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class ShardedStream(IterableDataset[Any]):
    """Samples of an iterable dataset that this rank reads. Every rank iterates over the full dataset.

    Args:
        dataset: the dataset, which yields the same samples on every rank.
        world: rank and number of ranks.
        batch_size: number of samples per batch of this rank; None if the dataset yields batches.
        drop_last: True to drop an incomplete last round.
    """

    def __init__(self, dataset: Any, world: World, batch_size: int | None, *, drop_last: bool) -> None:
        self.dataset = dataset
        self._batch_size = batch_size
        self._round = Round(world, batch_size or 1, completes=not drop_last)

    def __iter__(self) -> Iterator[Any]:
        for own in self._round.shares(self.dataset):
            yield from own

    def __len__(self) -> int:
        return self._round.count(len(self.dataset)) * (self._batch_size or 1)

    def num_kept(self, num_rows: int, num_ranks: int) -> int:
        """Return how many of ``num_rows`` gathered rows of the last round are not repeated."""
        if not self._round.num_real:
            return num_rows
        return self._round.num_real if self._batch_size else num_rows * self._round.num_real // num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the dataset."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class LaterBatches(Sampler[Any]):
    """Iterable over the items of ``batches`` after the first ``num_skipped`` items. The samples of the skipped items
    are not read."""

    def __init__(self, batches: Any, num_skipped: int) -> None:
        self._batches = batches
        self._num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._batches), self._num_skipped, None)

    def __len__(self) -> int:
        return max(0, len(self._batches) - self._num_skipped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._batches, name)


def with_generator(sampler: Any, generator: Any) -> Any:
    """Return a copy of ``sampler`` that draws from ``generator``."""
    copied = copy.copy(sampler)
    copied.generator = generator
    return copied
