"""Samplers that know where they are: an order fixed by (seed, epoch), and a walk along a user's sampler."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler

from roomier.core.errors import DataError
from roomier.core.world import World
from roomier.data.seeding import NumberedIndices, mix_seed

# Indices are turned into Python integers this many at a time: a list of 100 million takes 4 GB.
_CHUNK = 1 << 16

ALONE = World()


class OrderedSampler(Sampler[int]):
    """Indices ``0 .. num_samples - 1`` in an order that depends on ``(seed, epoch)`` alone.

    The position is counted in samples of the *global* order, the one all ranks share: rank ``r`` of ``N`` takes
    every ``N``-th sample behind it. So a run goes on where it stopped under another batch size or number of
    ranks, and no sample comes twice. All ranks take the same number of samples; the last
    ``num_samples % N`` of an epoch's order are left out (with shuffling, other ones each epoch).

    The global generators are neither read nor moved.

    Args:
        num_samples: length of the dataset, positive.
        shuffle: a new permutation each epoch; otherwise the indices rise.
        seed: of the permutations.
        world: which share of the order is this rank's.

    Raises:
        DataError: ``num_samples`` is not a positive integer.
    """

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int, world: World = ALONE) -> None:
        if not isinstance(num_samples, int) or num_samples < 1:
            raise DataError("num_samples", num_samples, "is not a positive integer", "Pass the length of the dataset")
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self.world = world
        self._epoch = 0
        self._num_samples_done = 0

    def set_position(self, epoch: int, num_samples_done: int = 0) -> None:
        """Let the next iteration give the samples of ``epoch`` behind the first ``num_samples_done``.

        Args:
            epoch: counted from 0.
            num_samples_done: in the global order, over all ranks, in ``[0, num_samples]``.
        """
        if not 0 <= num_samples_done <= self.num_samples:
            raise DataError(
                "num_samples_done",
                num_samples_done,
                f"does not lie in the {self.num_samples} samples of an epoch",
                "Pass a position that this data set has",
            )
        self._epoch = epoch
        self._num_samples_done = num_samples_done

    def num_left_after(self, num_samples_done: int) -> int:
        """How many samples of an epoch are left for this rank behind ``num_samples_done`` global ones."""
        return (self.num_samples - num_samples_done) // self.world.size

    def __len__(self) -> int:
        """Samples of one whole epoch on this rank, wherever the position stands."""
        return self.num_left_after(0)

    def __iter__(self) -> Iterator[int]:
        first = self._num_samples_done + self.world.rank
        stop = self._num_samples_done + self.num_left_after(self._num_samples_done) * self.world.size
        if not self.shuffle:
            yield from range(first, stop, self.world.size)
            return
        generator = torch.Generator().manual_seed(mix_seed(self.seed, self._epoch))
        order = torch.randperm(self.num_samples, generator=generator)[first : stop : self.world.size]
        for begin in range(0, len(order), _CHUNK):
            yield from order[begin : begin + _CHUNK].tolist()


class WalkedSampler(Sampler[Any]):
    """A user's sampler or batch sampler that can be walked past what was done, without loading it.

    Args:
        inner: gives indices, or lists of indices.
        numbered: give :class:`NumberedIndices` in their place.
    """

    def __init__(self, inner: Iterable[Any], *, numbered: bool) -> None:
        self._inner = inner
        self._numbered = numbered
        self._num_skipped = 0
        self._walked: Iterator[Any] | None = None

    def skip(self, num_batches: int) -> None:
        """Let the next iteration begin behind the first ``num_batches``."""
        self._num_skipped = num_batches
        self._walked = None

    def walk(self) -> None:
        """Do now what the next iteration would do first: draw the order and go past what is skipped."""
        self._walked = self._at_position()

    def _at_position(self) -> Iterator[Any]:
        iterator = iter(self._inner)
        num_walked = sum(1 for _ in islice(iterator, self._num_skipped))
        if num_walked < self._num_skipped:
            raise DataError(
                "sampler",
                self._inner,
                f"ended after {num_walked} batches; the position to go on from is {self._num_skipped}",
                "Resume with the data and the sampler of the saved run",
            )
        return iterator

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # TypeError where there is none, as torch expects

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers makes two iterators and reads the second only: nothing may happen before
        # the first read.
        iterator, self._walked = self._walked or self._at_position(), None
        if not self._numbered:
            yield from iterator
            return
        for number, indices in enumerate(iterator, start=self._num_skipped):
            yield NumberedIndices(number, indices)
