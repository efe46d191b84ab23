"""The ways to go on mid-epoch: one class for each kind of loader, chosen in ``choose.py``.

Here: what they share, and the one whose order roomier makes. The others are in ``batch_feeds.py``.

A feed starts an epoch, or resumes it behind a position. Both make the loader's iterator at once, so that what
the loader draws from the global generators at an epoch's start is drawn there, and neither reads a batch
before it is asked for (a replay reads those that were done).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.data.rebuild import generators_of
from roomier.data.sampler import OrderedSampler
from roomier.data.seeding import EpochSeed

PASS = 1 << 32  # epochs of a run are fewer; see [Note: passes within an epoch]


class Feed(ABC):
    """Batches of one loader, from the start of an epoch or from a position in it.

    Args:
        name: what the user calls the loader, for errors and notices.
    """

    kind: ClassVar[str]
    may_end_apart: bool = False
    """Whether the batches may be fewer than :attr:`num_batches`, or end at different times on different ranks."""

    reading: Iterator[Any] | None = None
    """The loader's own iterator, where :meth:`start` gave another one."""

    goes_on: bool = False
    """Whether an epoch was read before, by the saved run."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def loaders(self) -> Sequence[Any]:
        """The loaders that are read."""

    @property
    def ends_by_rank(self) -> bool:
        """Whether each rank may have another number of batches of its own."""
        return False

    @property
    def has_ended(self) -> bool:
        """Whether the running epoch is known to have no batch left, though the loop has not asked for one."""
        return False

    @property
    @abstractmethod
    def num_batches(self) -> int | float:
        """Batches of one whole epoch on this rank; ``inf`` where nothing tells."""

    @abstractmethod
    def start(self, epoch: int) -> Iterator[Any]:
        """The batches of ``epoch`` from its first."""

    @abstractmethod
    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        """The batches behind ``position``, and how many of :attr:`num_batches` are done. May move the global
        generators; the caller puts them back."""

    def end(self) -> None:
        """Release the iterator, whose queues to worker processes hold open files. No batch is read after this."""
        self.reading = None

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

    def sample_indices(self, first_batch: int, num_batches: int) -> list[int] | None:
        """The numbers of this rank's samples in these batches of the running epoch; None where nothing tells."""
        del first_batch, num_batches
        return None

    def position(self, num_batches: int) -> dict[str, Any]:
        """What :meth:`resume` needs besides the epoch, after ``num_batches`` of the running epoch on this rank.

        Every rank asks for it at the same time.
        """
        del num_batches
        return {}


def begin(loader: Iterable[Any], *, workers_were_there: bool) -> Iterator[Any]:
    """An iterator of ``loader``.

    Args:
        workers_were_there: in the saved run, whose workers stayed after the epoch before. A DataLoader draws a seed for
            its workers when it starts them, and none for those that stay: so none is drawn here.
    """
    if not (workers_were_there and isinstance(loader, DataLoader) and loader.persistent_workers):
        return iter(loader)
    own, generator = loader.generator, torch.Generator()
    generator.set_state(torch.get_rng_state() if own is None else own.get_state())
    loader.generator = generator
    try:
        return iter(loader)
    finally:
        loader.generator = own


class OwnGenerators:
    """The torch generators that hang on a loader, its dataset and its samplers: they are the user's, so no
    checkpoint of the global generators holds them."""

    def __init__(self, loader: object) -> None:
        self._generators = generators_of(loader)

    def agree(self, ranks: Ranks) -> None:
        """Take the states of rank 0, so that all ranks draw one order."""
        if self._generators:
            self.set_states(ranks.from_zero(self.states()))

    def states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set_states(self, states: list[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class OrderedFeed(Feed):
    """A DataLoader over an :class:`OrderedSampler`: resumes at a sample, at no cost, under any batch size.

    Args:
        loader: draws from ``sampler`` and groups its samples.
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
        own_generators: OwnGenerators,
        epoch_seed: EpochSeed | None,
    ) -> None:
        super().__init__(name)
        self._loader = loader
        self._sampler = sampler
        self._batch_size = sampler.batch_size
        self._own_generators = own_generators
        self._epoch_seed = epoch_seed
        self._first_sample = 0  # where the running epoch began to be read: in samples of the global order,
        self._first_batch = 0  # and in batches of the present size

    @property
    def loaders(self) -> Sequence[Any]:
        return (self._loader,)

    @property
    def num_batches(self) -> int:
        return self._num_batches_after(0)

    def _num_batches_after(self, num_samples_done: int) -> int:
        num_left = self._sampler.num_read_after(num_samples_done)  # the number of batches is that of all ranks
        return math.ceil(num_left / (self._batch_size * self._sampler.world.size))

    def start(self, epoch: int) -> Iterator[Any]:
        return self._start_at(epoch, num_samples_done=0)

    def _start_at(self, epoch: int, num_samples_done: int, of_order: dict[str, Any] | None = None) -> Iterator[Any]:
        self._first_sample = num_samples_done
        # Counted from the end, because that is what a loop waits for: under another batch size the done
        # samples need not fill whole batches.
        self._first_batch = self.num_batches - self._num_batches_after(num_samples_done)
        self._sampler.set_position(epoch, num_samples_done, of_order)
        if self._epoch_seed is not None:
            self._epoch_seed.set(self._sampler.seed, epoch)
        return begin(self._loader, workers_were_there=self.goes_on)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        self.check(position)
        self._sampler.seed = position["seed"]
        iterator = self._start_at(position["epoch"], position["num_samples"], position)
        self._own_generators.set_states(position["random_now"])
        return iterator, self._first_batch

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self.goes_on = True
        self._sampler.seed = position["seed"]
        self._own_generators.set_states(position["random_now"])

    def position(self, num_batches: int) -> dict[str, Any]:
        return {
            "num_samples": self.position_in_samples(num_batches),
            "dataset_size": self._sampler.num_samples,
            "num_ranks": self._sampler.world.size,
            "batch_size": self._batch_size,
            "shuffle": self._sampler.shuffle,
            "seed": self._sampler.seed,
            "random_now": self._own_generators.states(),
            **self._sampler.position_of_order,
        }

    def position_in_samples(self, num_batches: int) -> int:
        """Samples of the global order that ``num_batches`` of the running epoch hold."""
        num_read = (num_batches - self._first_batch) * self._batch_size * self._sampler.world.size
        return min(self._first_sample + num_read, self._sampler.num_samples)

    def sample_indices(self, first_batch: int, num_batches: int) -> list[int]:
        num_done = self.position_in_samples(first_batch)
        return self._sampler.indices_behind(num_done, num_batches * self._batch_size)

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
