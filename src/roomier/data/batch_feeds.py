"""Feeds that count batches instead of samples, because the user's code orders and groups the samples.

The order of the batches is identical on all ranks. With ``N`` ranks, each rank reads every ``N``-th batch
(:class:`Share`).
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from types import FunctionType
from typing import Any, Protocol

import numpy as np
from torch import Tensor, equal
from torch.utils.data import DataLoader

from roomier.core.device.rng import mix_seed, preserved_rng, rng_state, set_rng_state
from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.data import torch_loaders
from roomier.data.by_length import LengthGroupedBatchSampler
from roomier.data.feeds import PASS, Feed, OwnGenerators, begin
from roomier.data.sampler import WalkedSampler
from roomier.data.seeding import CommonDraws, EpochSeed
from roomier.data.share import FirstBatch, Reading


class SpeaksState(Protocol):
    """Protocol of a loader that saves its own position, such as torchdata's StatefulDataLoader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a position that :meth:`state_dict` returned."""


class BatchFeed(Feed):
    """Base class of feeds whose position is the total number of batches that the ranks have read.

    Args:
        loader: the loader that the user passed, or a copy of it.
        how: settings of the feed.
    """

    def __init__(self, loader: Any, how: Reading) -> None:
        super().__init__(how.name)
        self._loader, self._share, self._ranks, self._seed = loader, how.share, how.ranks, how.seed
        self._draws = CommonDraws() if how.share.divides or how.draws_apart else None
        self._first_batch, self._is_compared = FirstBatch(how, loader), False
        # Numbers of batches of the epoch, on all ranks and on this rank, that were done before this feed started.
        self._num_before = 0
        self._first = 0

    @property
    def loaders(self) -> Sequence[Any]:
        return (self._loader,)

    @property
    def ends_by_rank(self) -> bool:
        return self._share.divided_by is not None and self.may_end_apart

    @property
    def num_batches(self) -> int | float:
        return self._share.count(length_of(self._loader))

    def _begin(self, epoch: int, num_before: int = 0) -> None:
        self._num_before = num_before
        # Ranks can restart a loader at different times, and can resume parts of an epoch that end at different batches.
        self._is_compared = self._share.world.size > 1 and epoch < PASS and num_before == 0
        num_ranks, length = self._share.world.size, length_of(self._loader)
        if self._share.divided_by is not None or math.isinf(length):
            self._first = num_before // num_ranks
        else:  # count backward from the end, because the loop ends an epoch after num_batches batches
            self._first = int(self.num_batches - self._share.count(length - num_before))
        if self._draws is not None:
            by_rank = self._share.divided_by is not None
            self._draws.seed(mix_seed(self._seed, self._share.world.rank) if by_rank else self._seed, epoch)

    def _alike(self) -> AbstractContextManager[None]:
        """Return a context that uses the separate random states, if there are any. These states are identical on all
        ranks, unless the loader shards its own data.
        """
        return nullcontext() if self._draws is None else self._draws.inside()

    def _own_part(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self.reading = iterator
        batches = iterator if self._draws is None else self._draws.read(iterator)
        if self._is_compared:
            batches = self._first_batch.compared(batches)
        return batches if self._draws is None else self._share.of(batches)

    def position(self, num_batches: int) -> dict[str, Any]:
        num_ranks = self._share.world.size
        position = {
            "num_batches": self._num_before + (num_batches - self._first) * num_ranks,
            "num_ranks": num_ranks,
            "seed": self._seed,
        }
        own, share = self._own_position(), self._share
        if share.divided_by is None:
            return {**position, **own}
        divided = {"divided_by": share.divided_by, "keeps_order": share.keeps_order}
        return {**position, **divided, "by_rank": self._ranks.gather(own)}

    def check(self, position: dict[str, Any]) -> None:
        self._share.num_skipped(position, self.name, self._loader)

    def _own_position(self) -> dict[str, Any]:
        """Return the fields of a position that can differ between ranks if the loader shards its own data."""
        return {}

    def _of_this_rank(self, position: dict[str, Any]) -> dict[str, Any]:
        self._seed = position["seed"]
        by_rank = position.get("by_rank")
        if by_rank is None:
            return position
        world = self._share.world
        return {**position, **by_rank[world.rank if len(by_rank) == world.size else 0]}


class ListFeed(BatchFeed):
    """Resumable feed for a list of batches."""

    kind = "list"

    def start(self, epoch: int) -> Iterator[Any]:
        return self._start_at(epoch, 0)

    def _start_at(self, epoch: int, num_before: int) -> Iterator[Any]:
        self._begin(epoch, num_before)
        batches: Sequence[Any] = self._loader
        if not self._share.divides:
            return islice(batches, num_before, None) if num_before else iter(batches)
        world = self._share.world
        if self._is_compared and batches:
            self._first_batch.compare(batches[0])
        stop = num_before + (len(batches) - num_before) // world.size * world.size
        return islice(batches, num_before + world.rank, stop, world.size)

    def check(self, position: dict[str, Any]) -> None:
        if position["num_batches"] > len(self._loader):
            raise _too_short(self.name, self._loader, len(self._loader), position["num_batches"])

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        self.check(position)
        position = self._of_this_rank(position)
        return self._start_at(position["epoch"], position["num_batches"]), self._first

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self._of_this_rank(position)


class DrawnFeed(BatchFeed):
    """Base class of feeds that resume by drawing the same random numbers again, from the random states at the start of
    the epoch.

    Args:
        own_generators: generators of the user's loader, dataset and samplers.
    """

    def __init__(self, loader: Any, how: Reading, own_generators: OwnGenerators) -> None:
        super().__init__(loader, how)
        own_generators.agree(how.ranks if how.share.divides else how.ranks.peers)
        self._own_generators = own_generators
        self._at_start: dict[str, Any] = {}  # states of the global generators and of the user's generators
        if self._draws is None:
            self.begin_reading = self._note_first_read

    def _note_first_read(self) -> None:
        # Code that runs after the iterator is created, such as a hook, can draw from the global generators.
        self._at_start["first_read"] = rng_state()

    def _restore_first_read(self) -> None:
        if "first_read" in self._at_start:  # absent in earlier checkpoints
            set_rng_state(self._at_start["first_read"])

    def start(self, epoch: int) -> Iterator[Any]:
        self._begin(epoch)
        with self._alike():
            self._at_start = {"global": rng_state(), "own": self._own_generators.states()}
            return self._start_at(epoch, 0)

    @abstractmethod
    def _start_at(self, epoch: int, num_skipped: int) -> Iterator[Any]:
        """Return an iterator over the batches of this rank after the first ``num_skipped`` batches of the loader."""

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        self.check(position)
        position = self._of_this_rank(position)
        num_skipped = self._share.num_skipped(position, self.name, self._loader)
        self._begin(position["epoch"], position["num_batches"])
        with self._alike():
            self._at_start = dict(position["random_at_start"])
            set_rng_state(self._at_start["global"])
            self._own_generators.set_states(self._at_start["own"])
            batches = self._start_at(position["epoch"], num_skipped)
        self._own_generators.set_states(position["random_now"])  # the caller restores the global generators
        return batches, self._first

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self.continues = True
        self._own_generators.set_states(self._of_this_rank(position)["random_now"])

    def _own_position(self) -> dict[str, Any]:
        return {"random_at_start": self._at_start, "random_now": self._own_generators.states()}


class WalkedFeed(DrawnFeed):
    """Feed for a DataLoader with a custom sampler. The feed resumes by drawing the same indices again, without loading
    data.

    To resume, the sampler is iterated from the random states at the start of the epoch. If a sampler draws from the
    global generators for every index instead of once per epoch, resuming is exact only without workers.

    Args:
        loader: DataLoader that reads the indices of ``sampler``.
        sampler: sampler that yields the batches of this rank.
        epoch_seed: seed of the random numbers that worker processes draw for each batch; None without workers.
    """

    kind = "walked"

    def __init__(
        self,
        loader: DataLoader[Any],
        how: Reading,
        own_generators: OwnGenerators,
        sampler: WalkedSampler,
        epoch_seed: EpochSeed | None,
    ) -> None:
        super().__init__(loader, how, own_generators)
        self.may_end_apart = how.share.divided_by is not None and not how.share.keeps_order
        self._sampler = sampler
        self._sampler.draws = self._draws
        self._epoch_seed = epoch_seed

    @property
    def num_batches(self) -> int | float:
        return length_of(self._loader)  # the sampler counts the batches of this rank

    def _begin(self, epoch: int, num_before: int = 0) -> None:
        super()._begin(epoch, num_before)
        if math.isfinite(self.num_batches) and self._share.divides:
            length = length_of(self._sampler.inner)
            self._first = int(self.num_batches - self._share.count(length - num_before))

    def _start_at(self, epoch: int, num_skipped: int) -> Iterator[Any]:
        if self._epoch_seed is not None:
            self._epoch_seed.set(self._seed, epoch)
        self._sampler.first_batch = self._first_batch if self._share.divides and self._is_compared else None
        self._sampler.skip(num_skipped)
        iterator = begin(self._loader, had_workers=self.continues)
        if num_skipped and not self._loader.num_workers:
            # With workers, the iterator has already drawn indices. Without workers, it would draw them on the first
            # read, when the random states from the start of the epoch are no longer set.
            self._restore_first_read()
            self._sampler.walk()
        return iterator

    def position(self, num_batches: int) -> dict[str, Any]:
        position, inner = super().position(num_batches), self._sampler.inner
        if isinstance(inner, LengthGroupedBatchSampler) and self._share.divided_by is None:
            # Not stored for a loader that shards itself, because each rank can have different samples.
            position["sampler"] = inner.order_settings
        return position

    def check(self, position: dict[str, Any]) -> None:
        super().check(position)
        inner = self._sampler.inner
        if isinstance(inner, LengthGroupedBatchSampler):
            inner.check_order(position.get("sampler", {}), self.name)


class ReplayedFeed(DrawnFeed):
    """Feed for any iterable that cannot save its position. To resume, the feed reads and discards batches."""

    kind = "replayed"

    def __init__(self, loader: Iterable[Any], how: Reading) -> None:
        super().__init__(loader, how, OwnGenerators(loader))
        self.may_end_apart = how.share.world.size > 1 or not how.ranks.peers.is_alone
        # The __iter__ of a user-defined iterator can restart it. Generators and built-in iterators do not restart.
        self._is_one_shot = isinstance(loader, Iterator)
        self._may_restart = self._is_one_shot and isinstance(getattr(type(loader), "__iter__", None), FunctionType)
        self._was_started = False

    def _start_at(self, epoch: int, num_skipped: int) -> Iterator[Any]:
        iterator = self._iterate(epoch)
        self._restore_first_read()
        if num_skipped:
            notice(
                f"{self.name}: reading and discarding {num_skipped} batches to resume, because this loader does not "
                "save its position. A loader with state_dict() and load_state_dict() resumes immediately."
            )
        num_read = sum(1 for _ in islice(iterator, num_skipped))
        if num_read < num_skipped:
            raise _too_short(self.name, self._loader, num_read, num_skipped)
        return self._own_part(iterator)

    def _iterate(self, epoch: int) -> Iterator[Any]:
        is_repeated, self._was_started = self._is_one_shot and self._was_started, True
        if is_repeated and not self._may_restart:
            raise self._is_exhausted(epoch)
        iterator = begin(self._loader, had_workers=self.continues)
        return self._one_pass(iterator, epoch, is_repeated) if self._may_restart else iterator

    def _one_pass(self, iterator: Iterator[Any], epoch: int, is_repeated: bool) -> Iterator[Any]:
        # This function is a generator, because each further call of iter(iterator) would restart the iterator.
        is_empty = True
        for batch in iterator:
            is_empty = False
            yield batch
        if is_empty and is_repeated:
            raise self._is_exhausted(epoch)

    def _is_exhausted(self, epoch: int) -> DataError:
        problem = f"can be iterated only once, but epoch {epoch % PASS} iterates it again"
        action = "Pass a DataLoader, a list, or an object whose __iter__ returns a new iterator, or train for one epoch"
        return DataError(self.name, self._loader, problem, action)


class StatefulFeed(BatchFeed):
    """Feed for a loader with ``state_dict`` and ``load_state_dict``, which saves and restores its own position.

    Args:
        loader: loader that yields the batches.
        keeper: object that saves the position: the loader, or its dataset if no worker prefetches from the dataset.
    """

    kind = "stateful"

    def __init__(self, loader: Iterable[Any], how: Reading, keeper: SpeaksState) -> None:
        super().__init__(loader, how)
        self.may_end_apart = how.share.world.size > 1 or not how.ranks.peers.is_alone
        self._keeper = keeper
        self._begins_at_an_end = False
        self._unread: Iterator[Any] | None = None  # created for a resume

    @property
    def has_ended(self) -> bool:
        # After an incomplete last batch, the stream has already reported its end, and may have been reset to its start.
        return self._share.world.size == 1 and torch_loaders.has_ended(self.reading)

    def start(self, epoch: int) -> Iterator[Any]:
        self._begin(epoch)
        with self._alike():
            if self._unread is not None:  # if __iter__ is a generator, its first next() call applies the loaded state
                next(self._unread, None)
                self._unread = None
            iterator = iter(self._loader)
        batches = iterator
        if self._begins_at_an_end:
            self._begins_at_an_end = False
            batches = self._past_the_end(iterator)
        batches = self._own_part(batches)
        self.reading = iterator
        return batches

    def _past_the_end(self, iterator: Iterator[Any]) -> Iterator[Any]:
        # After the state of a finished epoch is loaded, some loaders start the next epoch, and others yield nothing.
        is_empty = True
        for batch in iterator:
            is_empty = False
            yield batch
        if is_empty:
            yield from self._loader

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        position = self._of_this_rank(position)
        self._share.num_skipped(position, self.name, self._loader)
        self._begin(position["epoch"], position["num_batches"])
        with self._alike():
            if position.get("draws") is not None:
                set_rng_state(position["draws"])
            self._load(position["loader"])
            self._unread = iterator = iter(self._loader)
        batches = self._own_part(self._read(iterator))
        self.reading = iterator
        return batches, self._first

    def _load(self, state: dict[str, Any]) -> None:
        self._keeper.load_state_dict(state)

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._unread = None
        yield from iterator

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        state = self._of_this_rank(position)["loader"]
        if is_complete:
            if len(position.get("by_rank", ())) in (0, self._share.world.size):  # otherwise, no state is of this shard
                self._load(state)
                self._begins_at_an_end = True
        elif not isinstance(self._keeper, DataLoader) and not self._restarts():
            with preserved_rng():
                continues = self._goes_on()
                self._keeper.load_state_dict(state)
                if not continues:  # the loaded state belongs to an iterator of the interrupted epoch, not of the next
                    self._state_behind_a_batch()

    def _restarts(self) -> bool:
        """Return True if the class is of a library whose loaders start a new epoch with each new iterator."""
        packages = {kind.__module__.partition(".")[0] for kind in type(self._keeper).__mro__}
        return not packages.isdisjoint(("torchdata", "datasets"))

    def _goes_on(self) -> bool:
        """Return True if a new iterator continues after the last yielded batch instead of starting an epoch.

        A new iterator can continue if the loader reads an endless stream. Loaders do not report this behavior, so this
        method reads a few batches and compares states.
        """
        first = self._state_behind_a_batch()
        second = self._state_behind_a_batch()
        self._keeper.load_state_dict(first)
        return is_same(second, self._state_behind_a_batch())

    def _state_behind_a_batch(self) -> dict[str, Any]:
        iterator = iter(self._loader)
        next(iterator, None)
        return copy.deepcopy(self._keeper.state_dict())

    def _own_position(self) -> dict[str, Any]:
        draws = None
        # The separate states are not seeded if no epoch has started since the position was loaded.
        if self._draws is not None and self._draws.are_seeded:
            with self._alike():
                draws = rng_state()
        return {"loader": self._keeper.state_dict(), "draws": draws}


class LitdataFeed(StatefulFeed):
    """Feed for a loader of litdata with a ``StreamingDataset``.

    Two numbers in a state of litdata 0.2.76 are corrected when it is loaded, because the next state would otherwise
    contain wrong values: the loader compares the number of ranks with the process group, although the stream may read
    the shards of all ranks, and if worker processes read the stream, the stream in this process keeps its own epoch.
    """

    def _load(self, state: dict[str, Any]) -> None:
        loader: Any = self._keeper
        of_stream = state["dataset"]
        loader.dataset.set_drop_last(of_stream["drop_last"])  # the default depends on the number of ranks
        num_detected = loader.dataset.distributed_env.detect().world_size
        loader.load_state_dict({**state, "dataset": {**of_stream, "world_size": num_detected}})
        loader.dataset.load_state_dict(dict(of_stream))
        loader.dataset.current_epoch = of_stream["current_epoch"]


def length_of(loader: object) -> int | float:
    """Return ``len(loader)``, or ``inf`` if the loader has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return math.inf


def _too_short(name: str, loader: object, num_batches: int, num_done: int) -> DataError:
    problem = f"has only {num_batches} batches, but the checkpoint was saved after batch {num_done}"
    return DataError(name, loader, problem, "Resume with the data of the saved run")


def is_same(one: Any, other: Any) -> bool:
    """Return True if both states have the same structure and equal values."""
    if isinstance(one, Mapping):
        is_alike = isinstance(other, Mapping) and one.keys() == other.keys()
        return is_alike and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        is_alike = isinstance(other, (list, tuple)) and len(one) == len(other)
        return is_alike and all(map(is_same, one, other))
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
