"""Samplers with a position: one sampler creates the order of the samples, and the other sampler skips the completed
batches of a custom sampler.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from roomier.core.device.rng import mix_seed
from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.data.seeding import CommonDraws, NumberedIndices
from roomier.data.share import ALONE, FirstBatch, Share

# Convert indices to Python integers in chunks, because a list of 100 million integers occupies 4 GB.
_CHUNK = 1 << 16


class DrawnOrder:
    """Permutations of torch's ``RandomSampler``, drawn on rank 0 when an epoch is first read.

    Args:
        generator: generator of the user's sampler; None for the global generator.
        ranks: ranks that use the same order; a single rank by default.

    Attributes:
        source: seed, or state of ``generator``, from which the permutation of the current epoch was drawn; None before
            the permutation is drawn.
    """

    def __init__(self, generator: torch.Generator | None = None, ranks: Ranks | None = None) -> None:
        self._generator = generator
        self._ranks = ranks or Ranks()
        self.source: int | Tensor | None = None

    def permutation(self, num_samples: int) -> Tensor:
        """Return the permutation of the current epoch, an int64 tensor of shape ``(num_samples,)``."""
        generator = torch.Generator()
        if self.source is None:
            if self._generator is None:
                self.source = self._ranks.from_zero(int(torch.empty((), dtype=torch.int64).random_()))
            else:
                self.source = self._ranks.from_zero(self._generator.get_state())
                generator = self._generator  # advances the user's generator
        if isinstance(self.source, Tensor):
            generator.set_state(self.source)
        else:
            generator.manual_seed(self.source)
        return torch.randperm(num_samples, generator=generator)

    def end(self, num_samples: int) -> None:
        """Draw the additional permutation that ``RandomSampler`` draws from its generator at the end of an epoch."""
        if self._generator is not None:
            torch.randperm(num_samples, generator=self._generator)


class OrderedSampler(Sampler[int]):
    """Sampler of the indices ``0 .. num_samples - 1`` whose order depends only on ``(seed, epoch)``, or is drawn from
    ``drawn``.

    The position counts samples of the *global* order, which all ranks share. A *round* is a micro-batch of all ranks:
    consecutive samples of this order, of which rank ``r`` of ``N`` reads every ``N``-th. A run can therefore resume
    with a different batch size or number of ranks without repeating or skipping a sample.

    All ranks read the same number of batches. The last batch can have one sample fewer on some ranks, and so can every
    batch if ``num_in_round`` is not a multiple of ``N``, for which :class:`RoundBatches` yields the batches. If fewer
    samples than ranks remain for the last batch, these samples are dropped. With shuffling, different samples are
    dropped in each epoch.

    The sampler does not use the global generators, unless ``drawn`` uses them.

    Args:
        num_samples: length of the dataset, a positive integer.
        shuffle: if True, use a new permutation in each epoch. If False, the indices are in ascending order.
        seed: seed for the permutations.
        world: rank and number of ranks.
        num_in_round: number of samples in a batch of all ranks; by default, one on each rank.
        drop_last: if True, drop a last batch that is incomplete on any rank.
        drawn: source of the permutations if they do not depend on ``(seed, epoch)``.

    Raises:
        DataError: ``num_samples`` is not a positive integer.

    Example:
        >>> sampler = OrderedSampler(len(dataset), shuffle=True, seed=0)
        >>> sampler.set_position(epoch=2, num_samples_done=640)
        >>> for index in sampler:  # the remaining samples of epoch 2
        ...     ...
    """

    def __init__(
        self,
        num_samples: int,
        *,
        shuffle: bool,
        seed: int,
        world: World = ALONE,
        num_in_round: int | None = None,
        drop_last: bool = False,
        drawn: DrawnOrder | None = None,
    ) -> None:
        if not isinstance(num_samples, int) or num_samples < 1:
            raise DataError("num_samples", num_samples, "must be a positive integer", "Pass the length of the dataset")
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self.world = world
        self.num_in_round = num_in_round or world.size
        self.drop_last = drop_last
        self._drawn = self._running = drawn if shuffle else None
        self._epoch = 0
        self._num_samples_done = 0

    @property
    def position_of_order(self) -> dict[str, Any]:
        """Fields that :meth:`set_position` requires to resume an epoch whose order was drawn; otherwise empty."""
        return {} if self._running is None else {"order": self._running.source}

    def set_position(self, epoch: int, num_samples_done: int = 0, of_order: Mapping[str, Any] | None = None) -> None:
        """Start the next iteration after the first ``num_samples_done`` samples of ``epoch``.

        Args:
            epoch: index of the epoch, counted from 0.
            num_samples_done: number of samples of the global order that all ranks together have read, in
                ``[0, num_samples]``.
            of_order: mapping with the fields of :attr:`position_of_order` if the order of this epoch was drawn; None to
                start a different epoch.

        Raises:
            DataError: ``num_samples_done`` is out of range.
        """
        if not 0 <= num_samples_done <= self.num_samples:
            problem = f"must be between 0 and {self.num_samples}, the number of samples in an epoch"
            raise DataError("num_samples_done", num_samples_done, problem, "Pass a position within this dataset")
        self._epoch = epoch
        self._num_samples_done = num_samples_done
        if of_order is None:
            self._running = self._drawn
        else:  # the resumed epoch uses a drawn order if the saved run did, independent of this sampler's ``drawn``
            self._running = (self._drawn or DrawnOrder()) if "order" in of_order else None
        if self._running is not None:
            self._running.source = None if of_order is None else of_order["order"]

    def num_read_after(self, num_samples_done: int) -> int:
        """Return how many samples remain for all ranks after ``num_samples_done`` samples, not counting dropped
        samples."""
        num_left = self.num_samples - num_samples_done
        num_in_last = num_left % self.num_in_round
        return num_left - num_in_last if self.drop_last or num_in_last < self.world.size else num_left

    def __len__(self) -> int:
        """Return the number of samples in one full epoch on this rank. The number does not depend on the position."""
        return math.ceil((self.num_read_after(0) - self.world.rank) / self.world.size)

    def __iter__(self) -> Iterator[int]:
        first = self._num_samples_done + self.world.rank
        stop = self._num_samples_done + self.num_read_after(self._num_samples_done)
        if not self.shuffle:
            yield from range(first, stop, self.world.size)
            return
        order = self._permutation()[first : stop : self.world.size]
        for begin in range(0, len(order), _CHUNK):
            yield from order[begin : begin + _CHUNK].tolist()
        is_read_to_its_end = self.num_samples % self.num_in_round and not self.drop_last
        if self._running is not None and self.world.size == 1 and is_read_to_its_end:
            self._running.end(self.num_samples)

    def rounds(self) -> Iterator[list[int]]:
        """Yield the indices of this rank in each round after the position."""
        order = self._permutation() if self.shuffle else None
        for places in self._places_behind(self._num_samples_done):
            yield list(places) if order is None else order[places.start : places.stop : places.step].tolist()

    def indices_behind(self, num_samples_done: int, num_rounds: int) -> list[int]:
        """Return the indices of this rank in the next ``num_rounds`` rounds of the current epoch, after
        ``num_samples_done`` global samples."""
        places = [*chain.from_iterable(islice(self._places_behind(num_samples_done), num_rounds))]
        return self._permutation()[places].tolist() if self.shuffle else places

    def _places_behind(self, num_samples_done: int) -> Iterator[range]:
        """Yield the places of this rank in the global order for each round after ``num_samples_done`` samples."""
        stop = num_samples_done + self.num_read_after(num_samples_done)
        for first in range(num_samples_done, stop, self.num_in_round):
            yield range(first + self.world.rank, min(first + self.num_in_round, stop), self.world.size)

    def _permutation(self) -> Tensor:
        if self._running is not None:
            return self._running.permutation(self.num_samples)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, self._epoch))
        return torch.randperm(self.num_samples, generator=generator)


class RoundBatches(Sampler[list[int]]):
    """Batch sampler with a batch for each round of ``ordered``."""

    def __init__(self, ordered: OrderedSampler) -> None:
        self.ordered = ordered

    def __len__(self) -> int:
        """Return the number of batches in one full epoch."""
        return math.ceil(self.ordered.num_read_after(0) / self.ordered.num_in_round)

    def __iter__(self) -> Iterator[list[int]]:
        return self.ordered.rounds()


class WalkedSampler(Sampler[Any]):
    """Wrapper for a user's sampler or batch sampler. The wrapper skips the batches that are done, without loading them.

    Args:
        inner: sampler that yields indices, or batch sampler that yields lists of indices.
        numbered: True to yield :class:`NumberedIndices` instead of indices.
        share: share of the batches that this rank reads; all batches by default.

    Attributes:
        inner: the argument ``inner``.
        draws: separate random states with which ``inner`` runs; None for the global generators.
        first_batch: comparison of the first batch of ``inner`` with the other ranks, if any.
    """

    def __init__(self, inner: Iterable[Any], *, numbered: bool, share: Share | None = None) -> None:
        self.inner = inner
        self.draws: CommonDraws | None = None
        self.first_batch: FirstBatch | None = None
        self._numbered = numbered
        self._share = share or Share()
        self._num_skipped = 0
        self._walked: Iterator[Any] | None = None

    def skip(self, num_batches: int) -> None:
        """Start the next iteration after the first ``num_batches`` batches of all ranks."""
        self._num_skipped = num_batches
        self._walked = None

    def walk(self) -> None:
        """Draw the order and skip completed batches immediately, not at the start of the next iteration."""
        self._walked = self._at_position()

    def _at_position(self) -> Iterator[Any]:
        iterator = self._drawn()
        num_walked = sum(1 for _ in islice(iterator, self._num_skipped))
        if num_walked < self._num_skipped:
            problem = f"ended after {num_walked} batches, but the run must resume after batch {self._num_skipped}"
            raise DataError("sampler", self.inner, problem, "Resume with the data and the sampler of the saved run")
        return iterator

    def _drawn(self) -> Iterator[Any]:
        if self.draws is None:
            return iter(self.inner)
        with self.draws.inside():
            iterator = iter(self.inner)
        return self.draws.read(iterator)

    def __len__(self) -> int:
        return int(self._share.count(len(self.inner)))  # type: ignore[arg-type]  # TypeError without a length

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers creates two iterators and reads only the second one, so the first iterator must have no
        # effect before its first read.
        iterator, self._walked = self._walked or self._at_position(), None
        if self.first_batch is not None:
            iterator = self.first_batch.compared(iterator)
        if self._numbered:
            numbers = count(self._num_skipped)
            if self._share.divided_by is not None:  # number the batches of all ranks, not of this rank
                world = self._share.world
                numbers = count(self._num_skipped * world.size + world.rank, world.size)
            iterator = (NumberedIndices(number, indices) for number, indices in zip(numbers, iterator, strict=False))
        yield from self._share.of(iterator)
