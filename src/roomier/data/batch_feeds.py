"""The ways to go on mid-epoch where a position counts batches: the user's code orders and groups the samples.

On several ranks each takes every ``N``-th batch of the order that all of them read alike (:class:`Share`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Protocol

from torch.utils.data import DataLoader

from roomier.core import torch_loaders
from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.rng import rng_state, set_rng_state
from roomier.data.common_draws import CommonDraws
from roomier.data.feeds import PASS, Feed, OwnGenerators, begin
from roomier.data.same import is_same
from roomier.data.sampler import WalkedSampler
from roomier.data.seeding import EpochSeed, mix_seed
from roomier.data.share import Share


class SpeaksState(Protocol):
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class EpochStart:
    """The random states in which an epoch was started: from there a loader's draws come out again."""

    def __init__(self, own: OwnGenerators) -> None:
        self._own = own
        self._state: dict[str, Any] = {}

    def remember(self) -> None:
        self._state = {"global": rng_state(), "own": self._own.states()}

    def position(self) -> dict[str, Any]:
        return {"random_at_start": self._state, "random_now": self._own.states()}

    def put_back(self, position: dict[str, Any]) -> None:
        """Set all generators as they were at the start of the epoch of ``position``, and remember that."""
        set_rng_state(position["random_at_start"]["global"])
        self._own.set_states(position["random_at_start"]["own"])
        self.remember()

    def leave(self, position: dict[str, Any]) -> None:
        """Set the user's generators as they were at ``position`` itself; the global ones are the caller's."""
        self._own.set_states(position["random_now"])


class BatchFeed(Feed):
    """What these feeds share: how many batches all ranks have read.

    Args:
        loader: what the user passed, or a copy of it.
        share: which batches are this rank's.
        ranks: the positions of a loader that divides itself are told among them.
        seed: of what all ranks must draw alike.
        draws_apart: what the loader's code draws does not depend on what is drawn elsewhere, by a loader beside it say.
    """

    def __init__(
        self, loader: Any, *, name: str, share: Share, ranks: Ranks, seed: int, draws_apart: bool = False
    ) -> None:
        super().__init__(name)
        self._loader = loader
        self._share = share
        self._ranks = ranks
        self._seed = seed
        self._draws = CommonDraws() if share.divides or draws_apart else None
        self._num_before = 0  # batches of all ranks that were done when the running epoch began to be read,
        self._first = 0  # and of this rank

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
        num_ranks, length = self._share.world.size, length_of(self._loader)
        if self._share.divided_by is not None or math.isinf(length):
            self._first = num_before // num_ranks
        else:  # counted from the end, because that is what a loop waits for
            self._first = int(self.num_batches - self._share.count(length - num_before))
        if self._draws is not None:
            by_rank = self._share.divided_by is not None
            self._draws.seed(mix_seed(self._seed, self._share.world.rank) if by_rank else self._seed, epoch)

    def _alike(self) -> AbstractContextManager[None]:
        """Inside, all ranks draw the same."""
        return nullcontext() if self._draws is None else self._draws.inside()

    def _own_part(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self.reading = iterator
        return iterator if self._draws is None else self._share.of(self._draws.read(iterator))

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

    def _own_position(self) -> dict[str, Any]:
        """What of a position may differ by rank where a loader divides itself."""
        return {}

    def _of_this_rank(self, position: dict[str, Any]) -> dict[str, Any]:
        self._seed = position["seed"]
        by_rank = position.get("by_rank")
        if by_rank is None:
            return position
        world = self._share.world
        return {**position, **by_rank[world.rank if len(by_rank) == world.size else 0]}


class ListFeed(BatchFeed):
    """A list of batches: resumes at an index."""

    kind = "list"

    def start(self, epoch: int) -> Iterator[Any]:
        return self._start_at(epoch, 0)

    def _start_at(self, epoch: int, num_before: int) -> Iterator[Any]:
        self._begin(epoch, num_before)
        batches: Sequence[Any] = self._loader
        if not self._share.divides:
            return islice(batches, num_before, None) if num_before else iter(batches)
        world = self._share.world
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


class WalkedFeed(BatchFeed):
    """A DataLoader with a sampler of the user's own: resumes by drawing the same indices again, loading none.

    The walk starts from the random states of the epoch's start. A sampler that draws from the global
    generators at every step, in place of once per epoch, comes back exactly only without workers.

    Args:
        loader: draws from ``sampler``, which gives this rank's batches.
        num_batches: of all ranks that read alike, in one epoch.
        own_generators: of the user's loader.
    """

    kind = "walked"

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: WalkedSampler,
        *,
        own_generators: OwnGenerators,
        epoch_seed: EpochSeed | None,
        name: str,
        share: Share,
        ranks: Ranks,
        seed: int,
        draws_apart: bool = False,
    ) -> None:
        super().__init__(loader, name=name, share=share, ranks=ranks, seed=seed, draws_apart=draws_apart)
        self.may_end_apart = share.divided_by is not None and not share.keeps_order
        self._sampler = sampler
        self._sampler.draws = self._draws
        self._epoch_seed = epoch_seed
        self._epoch_start = EpochStart(own_generators)

    @property
    def num_batches(self) -> int | float:
        return length_of(self._loader)  # the sampler counts this rank's

    def _begin(self, epoch: int, num_before: int = 0) -> None:
        super()._begin(epoch, num_before)
        if math.isfinite(self.num_batches) and self._share.divides:
            length = length_of(self._sampler.inner)
            self._first = int(self.num_batches - self._share.count(length - num_before))

    def start(self, epoch: int) -> Iterator[Any]:
        self._begin(epoch)
        with self._alike():
            self._epoch_start.remember()
            return self._start_at(epoch, 0)

    def _start_at(self, epoch: int, num_skipped: int) -> Iterator[Any]:
        if self._epoch_seed is not None:
            self._epoch_seed.set(self._seed, epoch)
        self._sampler.skip(num_skipped)
        return begin(self._loader, workers_were_there=self.goes_on)

    def check(self, position: dict[str, Any]) -> None:
        self._share.num_skipped(position, self.name, self._loader)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        position = self._of_this_rank(position)
        num_skipped = self._share.num_skipped(position, self.name, self._loader)
        self._begin(position["epoch"], position["num_batches"])
        with self._alike():
            self._epoch_start.put_back(position)
            iterator = self._start_at(position["epoch"], num_skipped)
            if num_skipped and not self._loader.num_workers:
                # With workers the iterator has drawn indices already; without, it would wait for the first read,
                # when the random states of the epoch's start are gone.
                self._sampler.walk()
        self._epoch_start.leave(position)
        return iterator, self._first

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self.goes_on = True
        self._epoch_start.leave(self._of_this_rank(position))

    def _own_position(self) -> dict[str, Any]:
        return self._epoch_start.position()


class ReplayedFeed(BatchFeed):
    """Any iterable without a state of its own: resumes by reading and dropping what was done."""

    kind = "replayed"

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        name: str,
        share: Share,
        ranks: Ranks,
        seed: int,
        draws_apart: bool = False,
    ) -> None:
        super().__init__(loader, name=name, share=share, ranks=ranks, seed=seed, draws_apart=draws_apart)
        self.may_end_apart = share.world.size > 1
        self._is_one_shot = isinstance(loader, Iterator)
        self._was_started = False
        own_generators = OwnGenerators(loader)
        if share.divides:
            own_generators.agree(ranks)
        self._epoch_start = EpochStart(own_generators)

    def start(self, epoch: int) -> Iterator[Any]:
        self._begin(epoch)
        with self._alike():
            self._epoch_start.remember()
            iterator = self._iterate(epoch)
        return self._own_part(iterator)

    def _iterate(self, epoch: int) -> Iterator[Any]:
        if self._is_one_shot and self._was_started:
            raise DataError(
                self.name,
                self._loader,
                f"can be read once only, and epoch {epoch % PASS} asks for it again",
                "Pass a DataLoader, a list, or an object whose __iter__ starts anew; or train for one epoch",
            )
        self._was_started = True
        return begin(self._loader, workers_were_there=self.goes_on)

    def check(self, position: dict[str, Any]) -> None:
        self._share.num_skipped(position, self.name, self._loader)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        position = self._of_this_rank(position)
        num_done = self._share.num_skipped(position, self.name, self._loader)
        self._begin(position["epoch"], position["num_batches"])
        with self._alike():
            self._epoch_start.put_back(position)
            iterator = self._iterate(position["epoch"])
            if num_done:
                notice(
                    f"{self.name}: reads and drops {num_done} batches to come back to where the run stopped, "
                    "because this loader keeps no position. One with state_dict() and load_state_dict() resumes "
                    "at once."
                )
            num_read = sum(1 for _ in islice(iterator, num_done))
        if num_read < num_done:
            raise _too_short(self.name, self._loader, num_read, num_done)
        self._epoch_start.leave(position)
        return self._own_part(iterator), self._first

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self.goes_on = True
        self._epoch_start.leave(self._of_this_rank(position))

    def _own_position(self) -> dict[str, Any]:
        return self._epoch_start.position()


def _begins_anew(kind: type) -> bool:
    """Whether it is of a library in which a new iterator is a new epoch, whatever was read before."""
    return kind.__module__.partition(".")[0] in ("torchdata", "datasets")


class StatefulFeed(BatchFeed):
    """A loader that speaks ``state_dict`` / ``load_state_dict``: it resumes by itself.

    Args:
        loader: gives the batches.
        keeper: keeps the position: the loader itself, or its dataset when no worker reads ahead in it.
    """

    kind = "stateful"

    def __init__(
        self,
        loader: Iterable[Any],
        keeper: SpeaksState,
        *,
        name: str,
        share: Share,
        ranks: Ranks,
        seed: int,
        draws_apart: bool = False,
    ) -> None:
        super().__init__(loader, name=name, share=share, ranks=ranks, seed=seed, draws_apart=draws_apart)
        self.may_end_apart = share.world.size > 1
        self._keeper = keeper
        self._begins_at_an_end = False
        self._unread: Iterator[Any] | None = None  # made for a resume

    @property
    def has_ended(self) -> bool:
        # A last batch that is not whole: the stream has said that it is at its end, and may stand at its begin again.
        return self._share.world.size == 1 and torch_loaders.has_ended(self.reading)

    def start(self, epoch: int) -> Iterator[Any]:
        self._begin(epoch)
        with self._alike():
            if self._unread is not None:  # an __iter__ that is a generator would take the loaded state only now
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
        # Given the state of a finished epoch, some loaders begin the next one, others have nothing left.
        is_empty = True
        for batch in iterator:
            is_empty = False
            yield batch
        if is_empty:
            yield from self._loader

    def check(self, position: dict[str, Any]) -> None:
        self._share.num_skipped(position, self.name, self._loader)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        position = self._of_this_rank(position)
        self._share.num_skipped(position, self.name, self._loader)
        self._begin(position["epoch"], position["num_batches"])
        with self._alike():
            if position.get("draws") is not None:
                set_rng_state(position["draws"])
            self._keeper.load_state_dict(position["loader"])
            self._unread = iterator = iter(self._loader)
        batches = self._own_part(self._read(iterator))
        self.reading = iterator
        return batches, self._first

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._unread = None
        yield from iterator

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        state = self._of_this_rank(position)["loader"]
        if is_complete:
            self._keeper.load_state_dict(state)
            self._begins_at_an_end = True
        elif not isinstance(self._keeper, DataLoader) and not any(map(_begins_anew, type(self._keeper).__mro__)):
            random_state = rng_state()
            goes_on = self._goes_on()
            self._keeper.load_state_dict(state)
            if not goes_on:  # what was loaded is for an iterator of the epoch that was cut short, not for the next one
                self._state_behind_a_batch()
            set_rng_state(random_state)

    def _goes_on(self) -> bool:
        """Whether a new iterator goes on where the one before it was left, as that of a stream without an end may, or
        begins an epoch. A loader does not say, so it is read a little."""
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
        if self._draws is not None and self._draws.are_seeded:  # else no epoch was begun since that of the position
            with self._alike():
                draws = rng_state()
        return {"loader": self._keeper.state_dict(), "draws": draws}


def length_of(loader: object) -> int | float:
    """``len(loader)``, or ``inf`` where it has none."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return math.inf


def _too_short(name: str, loader: object, num_batches: int, num_done: int) -> DataError:
    return DataError(
        name,
        loader,
        f"has {num_batches} batches; the position to go on from is behind {num_done}",
        "Resume with the data of the saved run",
    )
