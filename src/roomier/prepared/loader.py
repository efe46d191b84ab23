"""Prepared loader, which yields this rank's batches on its device and detects the last batch.

All ranks read the same number of full batches. The samples or batches that they read in one step are a round. As in
Accelerate, the first samples of the epoch fill an incomplete last round, and the number of samples in this round that
are not repeated is known at the end of the epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.data.rebuild import can_be_rebuilt, rebuilt, set_loader_epoch
from roomier.data.share import Share, share_of

_END = object()


@dataclass
class AccumulationState:
    """State that the prepared model, optimizers, schedulers and loaders of one Accelerator share.

    Attributes:
        num_steps: number of micro-batches per optimizer step.
        ends_with_loader: whether the last batch of a loader always ends the accumulation.
        is_syncing: whether the current micro-batch is the last micro-batch of an optimizer step.
        index: number of micro-batches since the start, or since the last batch of a loader ended an accumulation.
        loaders: loaders that are being read. The last loader in the list is the innermost loader.
    """

    num_steps: int = 1
    ends_with_loader: bool = True
    is_syncing: bool = True
    index: int = 0
    loaders: list[PreparedLoader] = field(default_factory=list)

    def advance(self) -> None:
        """Begin the next micro-batch."""
        if self.ends_with_loader and self.loaders and self.loaders[-1].end_of_dataloader:
            self.index, self.is_syncing = 0, True
        else:
            self.index += 1
            self.is_syncing = self.index % self.num_steps == 0


@dataclass
class LoaderPosition:
    """Position of a loader in its epochs. All copies of the loader share this position.

    Attributes:
        epoch: number of epochs that were read.
        start: states of the generators at the start of the current epoch: ``"torch"``, and ``"generator"`` if the
            loader has a generator. None between epochs.
        resumed: value of ``start`` from a checkpoint, or None. The next epoch draws its order from these states.
    """

    epoch: int = 0
    start: dict[str, Tensor] | None = None
    resumed: dict[str, Tensor] | None = None


class PreparedLoader:
    """Loader that yields this rank's batches on its device. ``isinstance`` treats the object as an instance of the
    class of ``loader``.

    One batch is read ahead, so that ``end_of_dataloader`` is already True when the last batch is yielded.

    Args:
        loader: loader of this rank's batches.
        move: function that moves a batch to the device.
        accumulation: position of the loop.
        share: selection of this rank's batches, if ``loader`` yields the batches of all ranks.
        generator: generator that determines the order of the samples. Rank 0 broadcasts its state before each epoch.
            None if the order is drawn from the default generator.
        ranks: all ranks.

    Attributes:
        end_of_dataloader: whether the last batch was yielded.
        order: position in the epochs.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        move: Callable[[Any], Any],
        accumulation: AccumulationState,
        ranks: Ranks,
        *,
        share: Share | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.loader = loader
        self.end_of_dataloader = False
        self.order = LoaderPosition()
        self._move = move
        self._accumulation = accumulation
        self._ranks = ranks
        self._share = share or Share()
        self._generator = generator
        self._num_discarded = 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.loader)

    def __iter__(self) -> Iterator[Any]:
        order, resumed = self.order, self.order.resumed
        now = torch.get_rng_state()
        if resumed is not None:
            torch.set_rng_state(resumed["torch"])
        order.start, order.resumed = self._start_of_order(resumed), None
        set_loader_epoch(self.loader, order.epoch)
        self.end_of_dataloader = False
        self._accumulation.loaders.append(self)
        try:
            batches = islice(self._share.of(iter(self.loader)), self._num_discarded, None)
            batch = next(batches, _END)
            if resumed is not None:  # the order is drawn when the first batch is read
                torch.set_rng_state(now)
            if batch is not _END:
                on_device = self._move(batch)
                for following in batches:
                    yield on_device
                    on_device = self._move(following)
                self.end_of_dataloader = True
                yield on_device
            order.epoch, order.start = order.epoch + 1, None
        finally:
            self._accumulation.loaders.remove(self)

    def _start_of_order(self, resumed: dict[str, Tensor] | None) -> dict[str, Tensor]:
        start = {"torch": torch.get_rng_state()}
        if self._generator is not None:
            own = self._generator.get_state() if resumed is None else resumed["generator"]
            self._generator.set_state(self._ranks.from_zero(own))
            start["generator"] = self._generator.get_state()
        return start

    def state_dict(self) -> dict[str, Any]:
        """Return the number of epochs that were read, and the states that determine the order of the next batches.

        The number of batches that were read in the current epoch is not included. After :meth:`load_state_dict`, skip
        these batches with ``accelerator.skip_first_batches``.
        """
        generator = None if self._generator is None else self._generator.get_state()
        return {"epoch": self.order.epoch, "start": self.order.start, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        A notice is printed if the saved epoch cannot continue in the same order. This happens if the user's sampler has
        no generator, and exactly one of the two runs (saved and resumed) has a single rank. A single rank draws the
        order from the default generator.
        """
        start = state["start"]
        if start is not None and ("generator" in start) != (self._generator is not None):
            start = None
            notice(
                "load_state: the checkpoint was written within an epoch, with a different number of ranks. The loader "
                "draws a new order, so skip_first_batches repeats or omits samples"
            )
        self.order.epoch, self.order.start, self.order.resumed = state["epoch"], None, start
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(state["generator"])

    def __len__(self) -> int:
        return max(0, int(self._share.count(len(self.loader))) - self._num_discarded)

    @property
    def total_batch_size(self) -> int:
        """Number of samples per step, over all ranks."""
        own = getattr(self.loader.batch_sampler, "batch_size", None) or self.loader.batch_size or 1
        return int(own) * self._ranks.world.size

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset, over all ranks."""
        dataset: Any = self.loader.dataset
        return len(dataset.dataset if isinstance(dataset, ShardedStream) else dataset)

    def num_kept(self, num_rows: int) -> int:
        """Return how many of the ``num_rows`` rows that were gathered for the last batch are not repeated samples."""
        for part in (self.loader.batch_sampler, self.loader.sampler, self.loader.dataset):
            count = getattr(part, "num_kept", None)
            if count is not None:
                return int(count(num_rows, self._ranks.world.size))
        return num_rows

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, its samplers and its dataset."""
        self.order.epoch = epoch
        set_loader_epoch(self.loader, epoch)

    def without_first(self, num_batches: int) -> PreparedLoader:
        """Return a loader that skips the first ``num_batches`` batches of this rank in each epoch."""
        later = copy.copy(self)
        if self._share.divides or isinstance(self.loader.dataset, IterableDataset) or not can_be_rebuilt(self.loader):
            later._num_discarded += num_batches
        else:
            later.loader = rebuilt_with(self.loader, LaterBatches(_index_sampler(self.loader), num_batches))
        return later

    def __repr__(self) -> str:
        return repr(self.loader)

    def __copy__(self) -> PreparedLoader:
        copied = object.__new__(PreparedLoader)
        copied.__dict__.update(self.__dict__)
        return copied

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def prepared_loader(
    loader: DataLoader[Any],
    ranks: Ranks,
    move: Callable[[Any], Any],
    accumulation: AccumulationState,
    *,
    splits_batches: bool = False,
) -> PreparedLoader:
    """Return a loader that yields this rank's batches of ``loader`` on its device.

    Args:
        loader: the user's loader, which is not modified.
        ranks: all ranks.
        move: function that moves a batch to the device.
        accumulation: position of the loop.
        splits_batches: True to divide each batch among the ranks, instead of reading one batch per rank.

    Raises:
        PlanError: ``splits_batches`` is set, and the batch size is not a multiple of the number of ranks.
    """
    if ranks.is_alone:
        found = getattr(_sampler_of(_index_sampler(loader)), "generator", None)
        of_sampler = found if isinstance(found, torch.Generator) else None
        return PreparedLoader(loader, move, accumulation, ranks, generator=of_sampler)
    share = share_of(loader, ranks.world)
    if share.divided_by is not None:
        notice(f"{share.divided_by} already shards the loader across ranks, so roomier does not shard it again")
        return PreparedLoader(loader, move, accumulation, ranks)
    if splits_batches:
        _check_divisible(loader, ranks)
    if not can_be_rebuilt(loader):
        notice(
            f"{type(loader).__name__} overrides __iter__ or __len__, so each rank reads all batches and uses one of "
            f"every {ranks.world.size} batches. If fewer batches remain at the end of an epoch, they are dropped"
        )
        return PreparedLoader(loader, move, accumulation, ranks, share=share)
    if isinstance(loader.dataset, IterableDataset):
        return PreparedLoader(_of_stream(loader, ranks, splits_batches), move, accumulation, ranks)
    batches, generator = _with_common_order(_index_sampler(loader), ranks)
    own = rebuilt_with(loader, ShardedBatches(batches, ranks.world, splits=splits_batches))
    return PreparedLoader(own, move, accumulation, ranks, generator=generator)


def rebuilt_with(loader: DataLoader[Any], index_sampler: Any) -> DataLoader[Any]:
    """Return a copy of ``loader`` that reads the indices of ``index_sampler``."""
    if loader.batch_sampler is None:
        return rebuilt(loader, sampler=index_sampler)
    return rebuilt(loader, batch_sampler=index_sampler)


def _sampler_of(batches: Any) -> Any:
    return getattr(batches, "sampler", batches)


def _index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _of_stream(loader: DataLoader[Any], ranks: Ranks, splits: bool) -> DataLoader[Any]:
    size = loader.batch_size
    if splits and size is not None:
        size //= ranks.world.size
    if loader.num_workers:
        notice("gather_for_metrics cannot drop repeated samples of an iterable dataset if its loader has workers")
    stream = ShardedStream(loader.dataset, ranks.world, size, drop_last=loader.drop_last)
    changes: dict[str, Any] = {"dataset": stream, "batch_size": size}
    if loader.batch_sampler is not None:
        changes["batch_sampler"] = copy.copy(loader.batch_sampler)
        changes["batch_sampler"].batch_size = size
    return rebuilt(loader, **changes)


def _with_common_order(batches: Any, ranks: Ranks) -> tuple[Any, torch.Generator | None]:
    """Return a copy of ``batches`` whose sampler draws the same order on every rank, together with the generator of
    this sampler. If the sampler cannot use a generator, return ``batches`` and None."""
    sampler = _sampler_of(batches)
    generator = getattr(sampler, "generator", False)
    if not (generator is None or isinstance(generator, torch.Generator)):
        return batches, None
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_())  # every rank draws a seed, as in Accelerate
        generator = torch.Generator().manual_seed(ranks.from_zero(seed))
    copied = copy.copy(sampler)
    copied.generator = generator
    if sampler is batches:
        return copied, generator
    batches = copy.copy(batches)
    batches.sampler = copied
    return batches, generator


def _check_divisible(loader: DataLoader[Any], ranks: Ranks) -> None:
    size = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size
    if size is None or size % ranks.world.size:
        problem = f"requires a batch size that is a multiple of {ranks.world.size} (number of ranks), but it is {size}"
        action = f"Set DataLoader(batch_size={ranks.world.size}) or a multiple of this size, or split_batches=False"
        raise PlanError("split_batches", True, problem, action)


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


class _Sharded:
    """Source of samples or batches that is divided into rounds.

    Attributes:
        source: the sampler of the full batches, or the dataset.
        counts_samples: True if the items of a round are samples; False if they are batches.
    """

    source: Any
    counts_samples: bool
    _round: Round

    def num_kept(self, num_rows: int, num_ranks: int) -> int:
        """Return how many of ``num_rows`` gathered rows of the last round are not repeated."""
        if not self._round.num_real:
            return num_rows
        return self._round.num_real if self.counts_samples else num_rows * self._round.num_real // num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` to the source."""
        set_epoch = getattr(self.source, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


class ShardedBatches(_Sharded, Sampler[list[Any]]):
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
        self.source = batches
        self.sampler = getattr(batches, "sampler", batches)
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self.counts_samples = type(batches) is BatchSampler
        self.batch_size: int | None = None
        if self.counts_samples:
            self.batch_size = batches.batch_size // world.size if splits else batches.batch_size
        self._num_samples = self.batch_size or 1
        self._round = Round(world, self._num_samples, completes=not self.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        if self.counts_samples:
            yield from self._round.shares(index for batch in self.source for index in batch)
        else:
            for [batch] in self._round.shares(self.source):
                yield batch

    def __len__(self) -> int:
        if not self.counts_samples:
            return self._round.count(len(self.source))
        size = int(self.source.batch_size)
        num_missing = 0 if self.drop_last else -len(self.sampler) % size  # samples that an incomplete last batch lacks
        return self._round.count(len(self.source) * size - num_missing)


class ShardedStream(_Sharded, IterableDataset[Any]):
    """Samples of an iterable dataset that this rank reads. Every rank iterates over the full dataset.

    Args:
        dataset: the dataset, which yields the same samples on every rank.
        world: rank and number of ranks.
        batch_size: number of samples per batch of this rank; None if the dataset yields batches.
        drop_last: True to drop an incomplete last round.
    """

    def __init__(self, dataset: Any, world: World, batch_size: int | None, *, drop_last: bool) -> None:
        self.dataset = self.source = dataset
        self.counts_samples = bool(batch_size)
        self._batch_size = batch_size
        self._round = Round(world, batch_size or 1, completes=not drop_last)

    def __iter__(self) -> Iterator[Any]:
        for own in self._round.shares(self.dataset):
            yield from own

    def __len__(self) -> int:
        return self._round.count(len(self.dataset)) * (self._batch_size or 1)


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
