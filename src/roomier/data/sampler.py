"""Samplers that know where they are: an order fixed by (seed, epoch), or drawn, and a walk along a user's sampler."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.data.common_draws import CommonDraws
from roomier.data.seeding import NumberedIndices, mix_seed
from roomier.data.share import ALONE, Share

# Indices are turned into Python integers this many at a time: a list of 100 million takes 4 GB.
_CHUNK = 1 << 16


class DrawnOrder:
    """The permutations that torch's ``RandomSampler`` gives: drawn when an epoch is first read, those of rank 0.

    Args:
        generator: the sampler's own; None for the global one.

    Attributes:
        source: what the permutation of the running epoch came from, a seed or the state of ``generator``; None until
            it is drawn.
    """

    def __init__(self, generator: torch.Generator | None = None, ranks: Ranks | None = None) -> None:
        self._generator = generator
        self._ranks = ranks or Ranks()
        self.source: int | Tensor | None = None

    def permutation(self, num_samples: int) -> Tensor:
        generator = torch.Generator()
        if self.source is None:
            if self._generator is None:
                self.source = self._ranks.from_zero(int(torch.empty((), dtype=torch.int64).random_()))
            else:
                self.source = self._ranks.from_zero(self._generator.get_state())
                generator = self._generator  # which goes on from there
        if isinstance(self.source, Tensor):
            generator.set_state(self.source)
        else:
            generator.manual_seed(self.source)
        return torch.randperm(num_samples, generator=generator)

    def end(self, num_samples: int) -> None:
        """``RandomSampler`` draws once more from its own generator when it is read to its end."""
        if self._generator is not None:
            torch.randperm(num_samples, generator=self._generator)


class OrderedSampler(Sampler[int]):
    """Indices ``0 .. num_samples - 1`` in an order that depends on ``(seed, epoch)`` alone, or one that torch draws.

    The position is counted in samples of the *global* order, the one all ranks share: rank ``r`` of ``N`` takes
    every ``N``-th sample behind it. So a run goes on where it stopped under another batch size or number of
    ranks, and no sample comes twice. All ranks take the same number of batches: the last one may hold a sample less
    on some ranks, and where it has fewer samples than there are ranks, these are left out (with shuffling, other ones
    each epoch).

    The global generators are neither read nor moved, but by orders that are drawn.

    Args:
        num_samples: length of the dataset, positive.
        shuffle: a new permutation each epoch; otherwise the indices rise.
        seed: of the permutations.
        world: which share of the order is this rank's.
        batch_size: samples that a rank takes at a time.
        drop_last: leave out a last batch that is not whole on all ranks.
        drawn: draws the permutations, where (seed, epoch) does not decide.

    Raises:
        DataError: ``num_samples`` is not a positive integer.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        shuffle: bool,
        seed: int,
        world: World = ALONE,
        batch_size: int = 1,
        drop_last: bool = False,
        drawn: DrawnOrder | None = None,
    ) -> None:
        if not isinstance(num_samples, int) or num_samples < 1:
            raise DataError("num_samples", num_samples, "is not a positive integer", "Pass the length of the dataset")
        self.num_samples = num_samples
        self.shuffle = shuffle
        self.seed = seed
        self.world = world
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._drawn = self._running = drawn if shuffle else None
        self._epoch = 0
        self._num_samples_done = 0

    @property
    def position_of_order(self) -> dict[str, Any]:
        """What :meth:`set_position` needs of a running epoch whose order was drawn."""
        return {} if self._running is None else {"order": self._running.source}

    def set_position(self, epoch: int, num_samples_done: int = 0, of_order: Mapping[str, Any] | None = None) -> None:
        """Let the next iteration give the samples of ``epoch`` behind the first ``num_samples_done``.

        Args:
            epoch: counted from 0.
            num_samples_done: in the global order, over all ranks, in ``[0, num_samples]``.
            of_order: a position that holds :attr:`position_of_order`, if the order of this epoch was drawn; None for
                another epoch.
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
        if of_order is None:
            self._running = self._drawn
        else:  # the running epoch ends as it began, whatever the next ones do
            self._running = (self._drawn or DrawnOrder()) if "order" in of_order else None
        if self._running is not None:
            self._running.source = None if of_order is None else of_order["order"]

    def num_left_after(self, num_samples_done: int) -> int:
        """How many samples of an epoch are left for this rank behind ``num_samples_done`` global ones."""
        return math.ceil((self.num_read_after(num_samples_done) - self.world.rank) / self.world.size)

    def num_read_after(self, num_samples_done: int) -> int:
        """How many samples of an epoch are left for all ranks behind ``num_samples_done``, without those left out."""
        num_left = self.num_samples - num_samples_done
        num_in_last = num_left % (self.batch_size * self.world.size)
        return num_left - num_in_last if self.drop_last or num_in_last < self.world.size else num_left

    def __len__(self) -> int:
        """Samples of one whole epoch on this rank, wherever the position stands."""
        return self.num_left_after(0)

    def __iter__(self) -> Iterator[int]:
        first = self._num_samples_done + self.world.rank
        stop = self._num_samples_done + self.num_read_after(self._num_samples_done)
        if not self.shuffle:
            yield from range(first, stop, self.world.size)
            return
        order = self._permutation()[first : stop : self.world.size]
        for begin in range(0, len(order), _CHUNK):
            yield from order[begin : begin + _CHUNK].tolist()
        is_read_to_its_end = self.num_samples % self.batch_size and not self.drop_last
        if self._running is not None and self.world.size == 1 and is_read_to_its_end:
            self._running.end(self.num_samples)

    def indices_behind(self, num_samples_done: int, num_wanted: int) -> list[int]:
        """The next indices of this rank in the running epoch, which has begun."""
        stop = num_samples_done + self.num_read_after(num_samples_done)
        places = range(num_samples_done + self.world.rank, stop, self.world.size)[:num_wanted]
        return self._permutation()[list(places)].tolist() if self.shuffle else list(places)

    def _permutation(self) -> Tensor:
        if self._running is not None:
            return self._running.permutation(self.num_samples)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, self._epoch))
        return torch.randperm(self.num_samples, generator=generator)


class WalkedSampler(Sampler[Any]):
    """A user's sampler or batch sampler that can be walked past what was done, without loading it.

    Args:
        inner: gives indices, or lists of indices.
        numbered: give :class:`NumberedIndices` in their place.
        share: which of them are this rank's.

    Attributes:
        draws: the randomness of ``inner``; None for the global generators.
    """

    def __init__(self, inner: Iterable[Any], *, numbered: bool, share: Share | None = None) -> None:
        self.inner = inner
        self.draws: CommonDraws | None = None
        self._numbered = numbered
        self._share = share or Share()
        self._num_skipped = 0
        self._walked: Iterator[Any] | None = None

    def skip(self, num_batches: int) -> None:
        """Let the next iteration begin behind the first ``num_batches``, those of other ranks included."""
        self._num_skipped = num_batches
        self._walked = None

    def walk(self) -> None:
        """Do now what the next iteration would do first: draw the order and go past what is skipped."""
        self._walked = self._at_position()

    def _at_position(self) -> Iterator[Any]:
        iterator = self._drawn()
        num_walked = sum(1 for _ in islice(iterator, self._num_skipped))
        if num_walked < self._num_skipped:
            raise DataError(
                "sampler",
                self.inner,
                f"ended after {num_walked} batches; the position to go on from is {self._num_skipped}",
                "Resume with the data and the sampler of the saved run",
            )
        return iterator

    def _drawn(self) -> Iterator[Any]:
        if self.draws is None:
            return iter(self.inner)
        with self.draws.inside():
            iterator = iter(self.inner)
        return self.draws.read(iterator)

    def __len__(self) -> int:
        return int(self._share.count(len(self.inner)))  # type: ignore[arg-type]  # TypeError where there is none

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers makes two iterators and reads the second only: nothing may happen before
        # the first read.
        iterator, self._walked = self._walked or self._at_position(), None
        if self._numbered:
            numbers = count(self._num_skipped)
            if self._share.divided_by is not None:  # by number among the batches of all ranks
                world = self._share.world
                numbers = count(self._num_skipped * world.size + world.rank, world.size)
            iterator = (NumberedIndices(number, indices) for number, indices in zip(numbers, iterator, strict=False))
        yield from self._share.of(iterator)
