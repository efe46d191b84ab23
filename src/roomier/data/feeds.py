"""The ways to go on mid-epoch: one class for each kind of loader, chosen in ``choose.py``.

A feed starts an epoch, or resumes it behind a position. Both make the loader's iterator at once, so that what
the loader draws from the global generators at an epoch's start is drawn there, and neither reads a batch
before it is asked for (a replay reads those that were done).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.utils.data import DataLoader

from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.rng import rng_state, set_rng_state
from roomier.data.rebuild import generators_of
from roomier.data.sampler import OrderedSampler, WalkedSampler
from roomier.data.seeding import EpochSeed


class SpeaksState(Protocol):
    """A loader that keeps its own position, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Feed(ABC):
    """Batches of one loader, from the start of an epoch or from a position in it.

    Args:
        name: what the user calls the loader, for errors and notices.
    """

    kind: ClassVar[str]

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def num_batches(self) -> int | float:
        """Batches of one whole epoch; ``inf`` where nothing tells."""

    @abstractmethod
    def start(self, epoch: int) -> Iterator[Any]:
        """The batches of ``epoch`` from its first."""

    @abstractmethod
    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        """The batches behind ``position``, and how many of :attr:`num_batches` are done. May move the global
        generators; the caller puts them back."""

    def check(self, position: dict[str, Any]) -> None:
        """Whether :meth:`resume` fits the loader, as far as can be told without reading it.

        Raises:
            DataError: the loader is not that of the saved run.
        """
        del position

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        """Take over from ``position`` what later epochs need; the epoch it lies in is over.

        Args:
            is_complete: all batches of that epoch were handed out.
        """
        del position, is_complete

    def position(self, num_batches: int) -> dict[str, Any]:
        """What :meth:`resume` needs besides the epoch, after ``num_batches`` of the running epoch."""
        del num_batches
        return {}


class ListFeed(Feed):
    """A list of batches: resumes at an index."""

    kind = "list"

    def __init__(self, batches: Sequence[Any], *, name: str) -> None:
        super().__init__(name)
        self._batches = batches

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    def start(self, epoch: int) -> Iterator[Any]:
        return iter(self._batches)

    def check(self, position: dict[str, Any]) -> None:
        if position["num_batches"] > len(self._batches):
            raise _too_short(self.name, self._batches, len(self._batches), position["num_batches"])

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        self.check(position)
        num_done = position["num_batches"]
        return islice(self._batches, num_done, None), num_done


class OwnGenerators:
    """The torch generators that hang on a loader, its dataset and its samplers: they are the user's, so no
    checkpoint of the global generators holds them."""

    def __init__(self, loader: object) -> None:
        self._generators = generators_of(loader)

    def states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


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


class OrderedFeed(Feed):
    """A DataLoader over an :class:`OrderedSampler`: resumes at a sample, at no cost, under any batch size.

    Args:
        loader: draws from ``sampler`` and groups its samples by ``batch_size``.
        drop_last: leaves out a smaller last batch.
        own_generators: of the user's loader.
        epoch_seed: fixes the randomness of samples in worker processes; None without workers.
    """

    kind = "ordered"

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: OrderedSampler,
        *,
        name: str,
        batch_size: int,
        drop_last: bool,
        own_generators: OwnGenerators,
        epoch_seed: EpochSeed | None,
    ) -> None:
        super().__init__(name)
        self._loader = loader
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._own_generators = own_generators
        self._epoch_seed = epoch_seed
        self._first_sample = 0  # where the running epoch began to be read: in samples of the global order,
        self._first_batch = 0  # and in batches of the present size

    @property
    def num_batches(self) -> int:
        return self._num_batches_after(0)

    def _num_batches_after(self, num_samples_done: int) -> int:
        num_left = self._sampler.num_left_after(num_samples_done)
        return num_left // self._batch_size if self._drop_last else math.ceil(num_left / self._batch_size)

    def start(self, epoch: int) -> Iterator[Any]:
        return self._start_at(epoch, num_samples_done=0)

    def _start_at(self, epoch: int, num_samples_done: int) -> Iterator[Any]:
        self._first_sample = num_samples_done
        # Counted from the end, because that is what a loop waits for: under another batch size the done
        # samples need not fill whole batches.
        self._first_batch = self.num_batches - self._num_batches_after(num_samples_done)
        self._sampler.set_position(epoch, num_samples_done)
        if self._epoch_seed is not None:
            self._epoch_seed.set(self._sampler.seed, epoch)
        return iter(self._loader)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        self.check(position)
        self._sampler.seed = position["seed"]
        iterator = self._start_at(position["epoch"], position["num_samples"])
        self._own_generators.set_states(position["random_now"])
        return iterator, self._first_batch

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self._sampler.seed = position["seed"]
        self._own_generators.set_states(position["random_now"])

    def position(self, num_batches: int) -> dict[str, Any]:
        num_read = (num_batches - self._first_batch) * self._batch_size * self._sampler.world.size
        return {
            "num_samples": min(self._first_sample + num_read, self._sampler.num_samples),
            "dataset_size": self._sampler.num_samples,
            "shuffle": self._sampler.shuffle,
            "seed": self._sampler.seed,
            "random_now": self._own_generators.states(),
        }

    def check(self, position: dict[str, Any]) -> None:
        action = "Resume with the data of the saved run, or start a new run from its weights"
        if position["dataset_size"] != self._sampler.num_samples:
            raise DataError(
                self.name,
                self._loader.dataset,
                f"has {self._sampler.num_samples} samples; the epoch to go on with was over {position['dataset_size']}",
                action,
            )
        if position["shuffle"] != self._sampler.shuffle:
            before, now = ("shuffled", "in order") if position["shuffle"] else ("in order", "shuffled")
            raise DataError(
                self.name, self._loader, f"is read {now}; the epoch to go on with was read {before}", action
            )


class WalkedFeed(Feed):
    """A DataLoader with a sampler of the user's own: resumes by drawing the same indices again, loading none.

    The walk starts from the random states of the epoch's start. A sampler that draws from the global
    generators at every step, in place of once per epoch, comes back exactly only without workers.

    Args:
        loader: draws from ``sampler``.
        own_generators: of the user's loader.
    """

    kind = "walked"

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: WalkedSampler,
        *,
        name: str,
        own_generators: OwnGenerators,
        seed: int,
        epoch_seed: EpochSeed | None,
    ) -> None:
        super().__init__(name)
        self._loader = loader
        self._sampler = sampler
        self._seed = seed
        self._epoch_seed = epoch_seed
        self._epoch_start = EpochStart(own_generators)

    @property
    def num_batches(self) -> int | float:
        return length_of(self._loader)

    def start(self, epoch: int) -> Iterator[Any]:
        self._epoch_start.remember()
        return self._start_at(epoch, num_batches_done=0)

    def _start_at(self, epoch: int, num_batches_done: int) -> Iterator[Any]:
        if self._epoch_seed is not None:
            self._epoch_seed.set(self._seed, epoch)
        self._sampler.skip(num_batches_done)
        return iter(self._loader)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        num_done = position["num_batches"]
        self._seed = position["seed"]
        self._epoch_start.put_back(position)
        iterator = self._start_at(position["epoch"], num_done)
        if num_done and not self._loader.num_workers:
            # With workers the iterator has drawn indices already; without, it would wait for the first read,
            # when the random states of the epoch's start are gone.
            self._sampler.walk()
        self._epoch_start.leave(position)
        return iterator, num_done

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self._seed = position["seed"]
        self._epoch_start.leave(position)

    def position(self, num_batches: int) -> dict[str, Any]:
        return {"seed": self._seed, **self._epoch_start.position()}


class ReplayedFeed(Feed):
    """Any iterable without a state of its own: resumes by reading and dropping what was done."""

    kind = "replayed"

    def __init__(self, loader: Iterable[Any], *, name: str) -> None:
        super().__init__(name)
        self._loader = loader
        self._is_one_shot = isinstance(loader, Iterator)
        self._was_started = False
        self._epoch_start = EpochStart(OwnGenerators(loader))

    @property
    def num_batches(self) -> int | float:
        return length_of(self._loader)

    def start(self, epoch: int) -> Iterator[Any]:
        self._epoch_start.remember()
        return self._iterate(epoch)

    def _iterate(self, epoch: int) -> Iterator[Any]:
        if self._is_one_shot and self._was_started:
            raise DataError(
                self.name,
                self._loader,
                f"can be read once only, and epoch {epoch} asks for it again",
                "Pass a DataLoader, a list, or an object whose __iter__ starts anew; or train for one epoch",
            )
        self._was_started = True
        return iter(self._loader)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        num_done = position["num_batches"]
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
        return iterator, num_done

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self._epoch_start.leave(position)

    def position(self, num_batches: int) -> dict[str, Any]:
        return self._epoch_start.position()


class StatefulFeed(Feed):
    """A loader that speaks ``state_dict`` / ``load_state_dict``: it resumes by itself.

    Args:
        loader: gives the batches.
        keeper: keeps the position: the loader itself, or its dataset when no worker reads ahead in it.
    """

    kind = "stateful"

    def __init__(self, loader: Iterable[Any], keeper: SpeaksState, *, name: str) -> None:
        super().__init__(name)
        self._loader = loader
        self._keeper = keeper
        self._begins_at_an_end = False

    @property
    def num_batches(self) -> int | float:
        return length_of(self._loader)

    def start(self, epoch: int) -> Iterator[Any]:
        if not self._begins_at_an_end:
            return iter(self._loader)
        self._begins_at_an_end = False
        return self._past_the_end(iter(self._loader))

    def _past_the_end(self, iterator: Iterator[Any]) -> Iterator[Any]:
        # Given the state of a finished epoch, some loaders begin the next one, others have nothing left.
        is_empty = True
        for batch in iterator:
            is_empty = False
            yield batch
        if is_empty:
            yield from self._loader

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        self._keeper.load_state_dict(position["loader"])
        return iter(self._loader), position["num_batches"]

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        # The state of an epoch that was cut short would make the next one begin in its middle.
        if is_complete:
            self._keeper.load_state_dict(position["loader"])
            self._begins_at_an_end = True

    def position(self, num_batches: int) -> dict[str, Any]:
        return {"loader": self._keeper.state_dict()}


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
