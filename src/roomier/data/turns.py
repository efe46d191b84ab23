"""Evaluation on several ranks, which take turns with the batches that a single rank would read.

[Note: turns]
Rank ``r`` of ``N`` evaluates the batches ``r``, ``r + N``, ... Every rank must run the same number of forward passes,
because the ranks all-gather the parameters of a sharded model together. If a rank has no batch left in the last round,
it evaluates the last batch of the loader again, and the repeated result is not counted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.world import World
from roomier.data import torch_loaders
from roomier.data.batch_feeds import length_of
from roomier.data.rebuild import can_be_rebuilt, rebuilt, with_sampler
from roomier.data.sampler import WalkedSampler
from roomier.data.seeding import CommonDraws
from roomier.data.share import FirstBatch, Reading


class Turn(NamedTuple):
    """One forward pass of an evaluation on this rank.

    Attributes:
        batch: host batch.
        number: index of the batch among the batches of all ranks.
        counts: True if the batch belongs to this rank. If False, the result is not counted, and the forward pass
            runs only because other ranks require it.
    """

    batch: Any
    number: int
    counts: bool = True


class TurnSampler(WalkedSampler):
    """Sampler that yields this rank's indices from ``inner``, and repeats the last batch to complete the last round.

    Args:
        inner: sampler or batch sampler of the user.
        world: rank and number of ranks.
        draws: random states with which ``inner`` runs. These states are identical on all ranks.
        first_batch: comparison of the first batch of ``inner`` with the other ranks.

    Attributes:
        limit: maximum number of batches for all ranks together.
        order: ``(number, counts)`` of each batch that has been yielded but not yet evaluated.
    """

    def __init__(self, inner: Iterable[Any], world: World, draws: CommonDraws, first_batch: FirstBatch) -> None:
        super().__init__(inner, numbered=False)
        self.draws, self.first_batch = draws, first_batch
        self.limit = math.inf
        self.order: deque[tuple[int, bool]] = deque()
        self._world = world

    def __len__(self) -> int:
        return math.ceil(min(super().__len__(), self.limit) / self._world.size)

    def __iter__(self) -> Iterator[Any]:
        for indices, number, counts in in_rounds(super().__iter__(), self._world, self.limit):
            self.order.append((number, counts))
            yield indices


def in_rounds(batches: Iterator[Any], world: World, limit: float) -> Iterator[Turn]:
    """Yield the turns of this rank. ``batches`` yields the batches of all ranks, and at most ``limit`` batches are
    read."""
    for start in count(0, world.size):
        own, num_read = None, 0
        for batch in islice(batches, int(min(world.size, limit - start))):
            if num_read <= world.rank:
                own = batch
            num_read += 1
        if num_read:
            yield Turn(own, start + min(world.rank, num_read - 1), world.rank < num_read)
        if num_read < world.size:
            return


class Turns:
    """Turns of this rank with the batches of one loader. Every rank must iterate over all of its turns.

    Args:
        loader: loader as a single rank would read it.
        how: settings. The seed is identical on all ranks.

    Attributes:
        loader: the loader that is read. The loader can be a copy that loads only the batches of this rank.
    """

    def __init__(self, loader: Any, how: Reading) -> None:
        self.loader = loader
        self._name, self._ranks, self._seed, self._divided_by = how.name, how.ranks, how.seed, how.share.divided_by
        self._draws = CommonDraws()
        self._first_batch = FirstBatch(how, loader)
        self._sampler: TurnSampler | None = None
        is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if self._divided_by is not None:
            notice(
                f"{how.name}: {self._divided_by} already shards this loader across ranks, so roomier does not shard it "
                "again"
            )
            self._longest = max(how.ranks.gather(length_of(loader)))
        elif is_map and can_be_rebuilt(loader):
            field = "sampler" if loader.batch_sampler is None else "batch_sampler"
            self._sampler = TurnSampler(getattr(loader, field), how.ranks.world, self._draws, self._first_batch)
            changes = {"in_order": True} if loader.num_workers else {}
            self.loader = rebuilt(loader, **{field: self._sampler}, **changes)

    @property
    def num_batches(self) -> int | float:
        """Number of batches for all ranks together; ``inf`` if this number is unknown."""
        if self._sampler is not None:
            return length_of(self._sampler.inner)
        return length_of(self.loader) if self._divided_by is None else self._longest * self._ranks.world.size

    def __call__(self, limit: float) -> Iterator[Turn]:
        """Return an iterator over the turns of this rank.

        Args:
            limit: maximum number of batches for all ranks together.

        Raises:
            DataError: the loader shards its own data and has no batch for a rank, or ranks read different numbers of
                batches from a stream.
        """
        world, draws, loader = self._ranks.world, self._draws, self.loader
        draws.seed(self._seed, 0)
        if isinstance(loader, (list, tuple)):
            return in_rounds(self._first_batch.compared(iter(loader)), world, limit)
        if self._divided_by is not None:
            return self._of_own(limit)
        if self._sampler is not None:
            return self._of_indices(self._sampler, limit)
        with draws.inside():
            iterator = iter(loader)
        return self._checked(in_rounds(self._first_batch.compared(draws.read(iterator)), world, limit))

    def _of_indices(self, sampler: TurnSampler, limit: float) -> Iterator[Turn]:
        """Yield the turns of a loader whose sampler selects the batches of this rank, so that only these batches are
        loaded."""
        sampler.limit = limit
        sampler.order.clear()
        iterator = iter(self.loader)
        try:
            for batch in iterator:
                yield Turn(batch, *sampler.order.popleft())
        finally:
            torch_loaders.end_workers(iterator)

    def _of_own(self, limit: float) -> Iterator[Turn]:
        rank, size = self._ranks.world.rank, self._ranks.world.size
        iterator, batch = iter(self.loader), None
        for start in count(0, size):
            if start >= limit:
                return
            got = list(islice(iterator, 1))
            have_one = self._ranks.gather(bool(got))
            if not any(have_one):
                return
            if start == 0 and not all(have_one):
                raise DataError(
                    self._name,
                    self.loader,
                    f"is sharded across ranks by {self._divided_by}, but rank {have_one.index(False)} has no batch",
                    "Provide at least one batch on each rank, or set shards_by_rank = False on the dataset, so that "
                    "roomier shards it",
                )
            batch = got[0] if got else batch
            yield Turn(batch, start + rank, bool(got) and start + rank < limit)

    def _checked(self, stream: Iterator[Turn]) -> Iterator[Turn]:
        """Check in each round that all ranks have a batch. Without this check, some ranks would wait forever for the
        other ranks."""
        while True:
            turn = next(stream, None)
            numbers = self._ranks.gather(None if turn is None else turn.number // self._ranks.world.size)
            if any(number != numbers[0] for number in numbers):
                raise DataError(
                    self._name,
                    self.loader,
                    "yields different numbers of batches on different ranks",
                    "Make its order deterministic. If this loader yields a different shard on each rank, set its "
                    "attribute shards_by_rank = True",
                )
            if turn is None:
                return
            yield turn


def without_padding(loader: Any, name: str, world: World) -> Any:
    """Return ``loader`` without torch's DistributedSampler.

    The DistributedSampler repeats samples until all ranks have the same number of samples, which would change the
    metrics.
    """
    if not isinstance(loader, DataLoader) or not can_be_rebuilt(loader):
        return loader
    batching = loader.batch_sampler
    sampler = loader.sampler if batching is None else getattr(batching, "sampler", None)
    if type(sampler) is not DistributedSampler or type(batching) not in (BatchSampler, type(None)):
        return loader
    if world.size > 1:
        notice(
            f"{name}: roomier replaced the DistributedSampler, which repeats samples, so that each sample counts once"
        )
    whole = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    return with_sampler(loader, whole)
