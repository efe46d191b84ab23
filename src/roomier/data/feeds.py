"""Feeds, which resume a loader within an epoch. Each kind of loader has a feed class, which ``choose.py`` selects.

This module contains the base class, and the feed for loaders whose order roomier creates. All other feeds are in
``batch_feeds.py``.

A feed starts an epoch, or resumes it after a position. In both cases, it creates the loader's iterator immediately, so
that the loader draws from the global generators at the start of the epoch, but reads no batch before the loop requests
one. The exception is a replay, which reads all batches before the position.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.data.rebuild import generators_of
from roomier.data.sampler import OrderedSampler
from roomier.data.seeding import EpochSeed

PASS = 1 << 32  # larger than the number of epochs in a run; see [Note: passes within an epoch]


class Feed(ABC):
    """Batches of one loader, from the start of an epoch or from a position in the epoch.

    Args:
        name: name of the argument that the user passed, for errors and notices.
    """

    kind: ClassVar[str]
    may_end_apart: bool = False
    """True if there can be fewer batches than :attr:`num_batches`, or if ranks can end after different numbers of
    batches."""

    reading: Iterator[Any] | None = None
    """Iterator of the loader, if :meth:`start` wrapped it in another iterator."""

    begin_reading: Callable[[], None] | None = None
    """Function that is called before the first batch of an epoch is read. Hooks can run between :meth:`start` and this
    call."""

    continues: bool = False
    """True if the saved run has read an epoch before the resumed epoch."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    @abstractmethod
    def loaders(self) -> Sequence[Any]:
        """Loaders that this feed reads."""

    @property
    def ends_by_rank(self) -> bool:
        """True if ranks can have different numbers of batches."""
        return False

    @property
    def has_ended(self) -> bool:
        """True if the loader has already reported the end of the current epoch, before the loop requests a further
        batch."""
        return False

    @property
    @abstractmethod
    def num_batches(self) -> int | float:
        """Number of batches in one full epoch on this rank; ``inf`` if this number is unknown."""

    @abstractmethod
    def start(self, epoch: int) -> Iterator[Any]:
        """Return an iterator over the batches of ``epoch``."""

    @abstractmethod
    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        """Return an iterator over the batches after ``position``, and how many of the :attr:`num_batches` batches are
        done.

        This method can change the global generators. The caller restores them.
        """

    def end(self) -> None:
        """Release the iterator, whose queues to worker processes use open files. No batch is read after this call."""
        self.reading = None

    def check(self, position: dict[str, Any]) -> None:
        """Check that :meth:`resume` supports ``position``, as far as possible without reading the loader.

        Raises:
            DataError: the loader differs from the loader of the saved run.
        """

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        """Restore the state that later epochs need. The epoch of ``position`` has ended.

        Args:
            position: position in the last epoch of the saved run.
            is_complete: True if all batches of that epoch were read.
        """

    def sample_indices(self, first_batch: int, num_batches: int) -> list[int] | None:
        """Return the dataset indices of this rank's samples in the given batches of the current epoch; None if
        unknown."""
        return None

    def position(self, num_batches: int) -> dict[str, Any]:
        """Return the fields that :meth:`resume` needs in addition to the epoch.

        Every rank must call this method at the same time.

        Args:
            num_batches: number of batches of the current epoch that are done on this rank.
        """
        return {}


def begin(loader: Iterable[Any], *, had_workers: bool) -> Iterator[Any]:
    """Return an iterator over ``loader``.

    Args:
        loader: loader to iterate.
        had_workers: True if the saved run already had persistent workers when the epoch began. In this
            case, its DataLoader drew no seed for the epoch, so no seed is drawn from the generators.
    """
    if not (had_workers and isinstance(loader, DataLoader) and loader.persistent_workers):
        return iter(loader)
    own, generator = loader.generator, torch.Generator()
    generator.set_state(torch.get_rng_state() if own is None else own.get_state())
    loader.generator = generator
    try:
        return iter(loader)
    finally:
        loader.generator = own


class OwnGenerators:
    """Torch generators that are attributes of a loader, its dataset and its samplers.

    These generators belong to the user, so a checkpoint of the global generators does not contain their states.
    """

    def __init__(self, loader: object) -> None:
        self._generators = generators_of(loader)

    def agree(self, ranks: Ranks) -> None:
        """Copy the states from rank 0, so that all ranks draw the same order."""
        if self._generators:
            self.set_states(ranks.from_zero(self.states()))

    def states(self) -> list[Tensor]:
        """Return the states of the generators."""
        return [generator.get_state() for generator in self._generators]

    def set_states(self, states: list[Tensor]) -> None:
        """Set the states that :meth:`states` returned."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class OrderedFeed(Feed):
    """Feed for a DataLoader with an :class:`OrderedSampler`. The feed resumes directly at a sample, with any batch
    size.

    Args:
        loader: DataLoader that groups the samples of ``sampler`` into batches.
        own_generators: generators of the user's loader.
        sampler: sampler that determines the order of the samples.
        epoch_seed: seed of the random numbers that worker processes draw for each sample; None without workers.
    """

    kind = "ordered"

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        own_generators: OwnGenerators,
        sampler: OrderedSampler,
        epoch_seed: EpochSeed | None,
    ) -> None:
        super().__init__(name)
        self._loader = loader
        self._sampler = sampler
        self._own_generators = own_generators
        self._epoch_seed = epoch_seed
        # Position in the current epoch at which this feed started, in global samples and in batches of this rank.
        self._first_sample = 0
        self._first_batch = 0

    @property
    def loaders(self) -> Sequence[Any]:
        return (self._loader,)

    @property
    def num_batches(self) -> int:
        return self._num_batches_after(0)

    def _num_batches_after(self, num_samples_done: int) -> int:
        num_left = self._sampler.num_read_after(num_samples_done)  # all ranks have the same number of batches
        return math.ceil(num_left / self._sampler.num_in_round)

    def start(self, epoch: int) -> Iterator[Any]:
        return self._start_at(epoch, num_samples_done=0)

    def _start_at(self, epoch: int, num_samples_done: int, of_order: dict[str, Any] | None = None) -> Iterator[Any]:
        self._first_sample = num_samples_done
        # Count backward from the end, because the loop ends an epoch after num_batches batches. With a different batch
        # size, the samples that are done may not fill complete batches.
        self._first_batch = self.num_batches - self._num_batches_after(num_samples_done)
        self._sampler.set_position(epoch, num_samples_done, of_order)
        if self._epoch_seed is not None:
            self._epoch_seed.set(self._sampler.seed, epoch)
        return begin(self._loader, had_workers=self.continues)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        self.check(position)
        self._sampler.seed = position["seed"]
        iterator = self._start_at(position["epoch"], position["num_samples"], position)
        self._own_generators.set_states(position["random_now"])
        return iterator, self._first_batch

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        self.continues = True
        self._sampler.seed = position["seed"]
        self._own_generators.set_states(position["random_now"])

    def position(self, num_batches: int) -> dict[str, Any]:
        return {
            "num_samples": self.position_in_samples(num_batches),
            "dataset_size": self._sampler.num_samples,
            "num_ranks": self._sampler.world.size,
            "batch_size": math.ceil(self._sampler.num_in_round / self._sampler.world.size),
            "shuffle": self._sampler.shuffle,
            "seed": self._sampler.seed,
            "random_now": self._own_generators.states(),
            **self._sampler.position_of_order,
        }

    def position_in_samples(self, num_batches: int) -> int:
        """Return how many samples of the global order are in the first ``num_batches`` batches of the current epoch."""
        num_read = (num_batches - self._first_batch) * self._sampler.num_in_round
        return min(self._first_sample + num_read, self._sampler.num_samples)

    def sample_indices(self, first_batch: int, num_batches: int) -> list[int]:
        return self._sampler.indices_behind(self.position_in_samples(first_batch), num_batches)

    def check(self, position: dict[str, Any]) -> None:
        action = "Resume with the data of the saved run, or start a new run from its weights"
        if position["dataset_size"] != self._sampler.num_samples:
            problem = f"has {self._sampler.num_samples} samples, but the epoch to resume has {position['dataset_size']}"
            raise DataError(self.name, self._loader.dataset, problem, action)
        if position["shuffle"] != self._sampler.shuffle:
            before, now = ("shuffled", "in order") if position["shuffle"] else ("in order", "shuffled")
            raise DataError(
                self.name, self._loader, f"is read {now}, but the epoch to resume was read {before}", action
            )
