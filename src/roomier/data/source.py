"""Source: batches of one loader, epoch by epoch, with a position that a checkpoint can hold."""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from roomier.core import torch_loaders
from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.core.rng import rng_state, set_rng_state
from roomier.core.world import World
from roomier.data.batch_feeds import ListFeed, ReplayedFeed
from roomier.data.choose import check_is_one_loader, in_own_processes, no_batch, training_feed
from roomier.data.combined import CombinedLoader, JointBatches
from roomier.data.combined_feed import CombinedFeed
from roomier.data.divided import share_of
from roomier.data.feeds import Feed
from roomier.data.lengths import check_lengths, no_batch_on
from roomier.data.rebuild import tell_epoch
from roomier.data.share import Share
from roomier.data.turns import Turn, Turns, without_padding
from roomier.data.workers import end_with_signals


@dataclass
class _Running:
    """The epoch that is being read."""

    epoch: int
    num_batches: int
    is_exhausted: bool = False


class Source:
    """What a loop reads its batches from.

    A batch is pulled from the loader when the loop asks for it and never ahead (worker processes of a
    DataLoader do read ahead): dataset code may draw from the global generators, whose state a checkpoint takes
    between two steps.

    To go on with a saved run: ``load_state_dict(state)``, put the global generators back, then
    ``start(epoch)`` with the epoch the run stood in. If batches of that epoch are done, the iterator begins
    behind them, and this ``start`` leaves the global generators as it found them. If that epoch was over, call
    ``start`` with the next one: it draws from the global generators what it drew in the first run.

    How a position is kept depends on the loader:

    - a list or tuple of batches: an index;
    - a DataLoader that torch batches, in order or with ``shuffle=True``: a sample of the global order
      (:class:`OrderedSampler` takes the place of its sampler). Resumes at once, under any batch size. In
      worker processes each sample's randomness depends on (seed, epoch, index) alone;
    - a DataLoader with another sampler: a number of batches, walked without loading;
    - a loader with ``state_dict`` and ``load_state_dict``: its own state, a dict of plain values and tensors;
    - any other iterable: a number of batches, read and dropped on resume, with a notice. A generator can be
      read for one epoch.

    - a :class:`CombinedLoader`: the position of each loader in it, and which pass over it is running. What a loader in
      it draws from the global generators it draws from states of its own.

    A loader, dataset or sampler with ``set_epoch`` is told each epoch; in evaluation all but the dataset, epoch 0.

    On several ranks the global order is the one that all of them share. Of a DataLoader that torch batches, each takes
    its samples (:class:`OrderedSampler`); of anything else every ``N``-th batch, unless the loader divides itself
    (:func:`roomier.data.divided.share_of`). All ranks get the same number of batches, and positions hold under another
    number of ranks.

    Args:
        loader: what the user passed.
        name: what the user calls it (``"train_dataloaders"``), for errors.
        seed: of the order and of the samples' randomness; that of rank 0 counts.
        ranks: those that share the data.
        draws_order: with ``shuffle=True`` the order is the one that torch's sampler draws as each epoch begins, on rank
            0, and not one that depends on (seed, epoch) alone. Not of loaders in a :class:`CombinedLoader`.
        shuffle_allowed: False freezes ``shuffle=True`` to the sequential order, as overfitting on a few
            batches needs.
        training: False keeps the user's sampler, always.
        pin_memory: let a DataLoader give batches in pinned memory. For a run on a CUDA device.

    Raises:
        DataError: ``loader`` gives no batches, or is known to be empty.
    """

    def __init__(
        self,
        loader: Any,
        *,
        name: str,
        seed: int,
        ranks: Ranks | None = None,
        draws_order: bool = False,
        shuffle_allowed: bool = True,
        training: bool = True,
        pin_memory: bool = False,
    ) -> None:
        self.loader = loader
        self.name = name
        self._ranks = ranks = ranks or Ranks()
        self._is_training = training
        self._turns: Turns | None = None
        self._feed: Feed
        check_lengths(loader, name, ranks, training=training)
        if training:
            self._feed = training_feed(
                loader,
                name=name,
                seed=seed,
                ranks=ranks,
                shuffle_allowed=shuffle_allowed,
                pin_memory=pin_memory,
                draws_order=draws_order,
            )
        else:  # the user's loader as it is: nothing of it is shuffled anew
            whole = _evaluated(loader, name, ranks.world, pin_memory)
            kind = ListFeed if isinstance(whole, (list, tuple)) else ReplayedFeed
            self._feed = kind(whole, name=name, share=Share(), ranks=ranks, seed=seed)
            if not ranks.is_alone:
                self._turns = Turns(whole, name=name, ranks=ranks, seed=ranks.from_zero(seed))
        if self._feed.num_batches == 0:
            raise self._empty()
        # Workers that the user started earlier are the user's.
        self._kept_before = [(each, torch_loaders.kept_iterator(each)) for each in self._loaders_read()]
        self._running: _Running | None = None
        self._batches: Generator[Any, None, None] | None = None
        self._stored: dict[str, Any] | None = None

    @property
    def num_batches(self) -> int | float:
        """Batches of one whole epoch, of this rank in training and of all ranks in evaluation; ``inf`` where the loader
        has no length."""
        return self._feed.num_batches if self._turns is None else self._turns.num_batches

    @property
    def follow_each_other(self) -> bool:
        """Whether several loaders are read in training one after another (``"sequential"``)."""
        return isinstance(self._feed, CombinedFeed) and self._feed.mode == "sequential"

    @property
    def part_lengths(self) -> list[int | float]:
        """The batches of one pass over each of several loaders, as :attr:`num_batches` counts them; else of the one."""
        return self._feed.part_lengths if isinstance(self._feed, CombinedFeed) else [self.num_batches]

    def limit_parts(self, limits: Sequence[float]) -> None:
        """How many batches are taken at the most of each of several loaders that follow each other. Before the first
        ``start``."""
        assert isinstance(self._feed, CombinedFeed)
        self._feed.limit_parts(limits)

    @property
    def may_end_apart(self) -> bool:
        """Whether batches may be fewer than :attr:`num_batches`, or end at different times on different ranks."""
        return self._feed.may_end_apart

    @property
    def num_batches_done(self) -> int:
        """Batches of the running epoch that were handed out, by this run or the one it goes on with.

        After a resume under another batch size: ``num_batches`` less those still to come.
        """
        return self._running.num_batches if self._running else 0

    def start(self, epoch: int) -> Iterator[Any]:
        """The host batches of ``epoch``, counted from 0: all of them, or those behind the loaded position.

        Raises:
            DataError: the loader can be read once only and was; or, on the first ``next``, it is empty; or the
                loaded position does not fit this loader.
        """
        stored, self._stored = self._stored, None
        running = _Running(epoch, 0)
        self._tell_epoch(epoch)
        if stored is None or stored["epoch"] != epoch:
            if stored is not None and stored["epoch"] >= 0:
                self._feed.adopt(stored, is_complete=stored["is_exhausted"])
            iterator = self._feed.start(epoch)
        else:
            random_state = rng_state()
            iterator, running.num_batches = self._resume(stored)
            set_rng_state(random_state)
        self._running = running
        self._batches = self._count(iterator, running, self._feed.reading)
        return self._batches

    def _tell_epoch(self, epoch: int) -> None:
        for loader in self.loader.flattened if isinstance(self.loader, CombinedLoader) else (self.loader,):
            tell_epoch(loader, epoch, training=self._is_training)

    def turns(self, limit: float) -> Iterator[Turn]:
        """The forwards of this rank in an evaluation of at most ``limit`` batches; see [Note: turns].

        Raises:
            DataError: the loader is empty, or cannot be divided.
        """
        if self._turns is None:
            batches = islice(self.start(0), None if limit == math.inf else int(limit))
            return (Turn(batch, number) for number, batch in enumerate(batches))
        self._tell_epoch(0)
        self._running = _Running(0, 0)
        self._batches = self._count(self._turns(limit), self._running)
        return self._batches

    def sample_indices(self, first_batch: int, num_batches: int) -> list[int] | None:
        """The numbers, in the data set, of this rank's samples in these batches of the running epoch; None where
        roomier does not make the order."""
        return self._feed.sample_indices(first_batch, num_batches)

    def empty_on(self, ranks: Sequence[int]) -> DataError:
        """The error for an epoch that has no batch on ``ranks``, of loaders for which :attr:`may_end_apart` is true."""
        return no_batch_on(ranks, self.name, self.loader)

    @property
    def _agrees_on_ends(self) -> bool:
        """Whether the loop asks all ranks if they have a batch: it finds the ranks that have none."""
        return self._is_training and self.may_end_apart and not self._ranks.is_alone

    def end_epoch(self) -> None:
        """The running epoch is over, though this rank may have batches left."""
        if self._running is not None:
            self._running.is_exhausted = True

    def close(self) -> None:
        """End the epoch that is being read, and its worker processes unless they are persistent."""
        if self._batches is not None:
            self._batches.close()

    def end(self) -> None:
        """End every worker process that this source started, persistent ones included; the run is over.

        Without it, they run as long as the source or the error that ended the run is referenced. The garbage collector
        then waits 5 s for each, and torch reports the death of any other child process as the death of a worker.
        """
        self.close()
        for loader, before in self._kept_before:
            if torch_loaders.kept_iterator(loader) is not before:
                torch_loaders.end_kept_workers(loader)
        if self._running is not None:
            self._running.is_exhausted |= self._feed.has_ended
        self._feed.end()
        self._batches = None

    def _loaders_read(self) -> Iterator[Any]:
        for loader in (*self._feed.loaders, *(() if self._turns is None else (self._turns.loader,))):
            yield from loader.combined.flattened if isinstance(loader, JointBatches) else (loader,)

    def _resume(self, stored: dict[str, Any]) -> tuple[Iterator[Any], int]:
        if stored["is_exhausted"]:
            self._feed.adopt(stored, is_complete=True)
            length = self._feed.num_batches
            return iter(()), int(length) if math.isfinite(length) else stored["num_batches"] // self._ranks.world.size
        return self._feed.resume(stored)

    def _count(
        self, iterator: Iterator[Any], running: _Running, reading: Iterator[Any] | None = None
    ) -> Generator[Any, None, None]:
        try:
            for batch in iterator:
                running.num_batches += 1
                yield batch
        except BaseException as error:
            failure = _failure_of_workers(error, running.num_batches)
            if failure is not None:
                end_with_signals()
            torch_loaders.end_workers(iterator if reading is None else reading)
            if isinstance(iterator, Generator):
                iterator.close()
            if failure is None:
                raise
            raise DataError(self.name, self.loader, *failure) from error
        running.is_exhausted = True
        if running.num_batches == 0 and not self._agrees_on_ends:
            raise self._empty()

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch handed out: nested dicts of numbers, text and tensors. Every rank must ask
        for it at the same time; it is the same on all.

        ``epoch`` is -1 before the first ``start``. ``num_samples``, in the global order, stands where the
        sampler was replaced.
        """
        if self._stored is not None:
            return self._stored
        state = {"kind": self._feed.kind, "epoch": -1, "num_batches": 0, "is_exhausted": False}
        if self._running is None:
            return state
        num_batches = self._running.num_batches
        is_exhausted = self._running.is_exhausted or num_batches >= self._feed.num_batches or self._feed.has_ended
        return {
            **state,
            "epoch": self._running.epoch,
            "num_batches": num_batches,
            "is_exhausted": is_exhausted,
            **self._feed.position(num_batches),  # where it counts batches, those of all ranks
        }

    def position_behind(self, epoch: int, num_batches: int) -> dict[str, Any]:
        """A position as :meth:`state_dict` gives it, behind ``num_batches`` of ``epoch`` on each rank, for a run
        that kept none. Random draws of the epoch's start are those that come now.

        Raises:
            DataError: within an epoch over several loaders, which have a position each.
        """
        if self._feed.kind == "combined":
            if num_batches:
                problem = f"stands {num_batches} batches within an epoch, and holds no position of each of its loaders"
                action = "Go on from a checkpoint of an epoch's end, or begin a new run from the weights"
                raise DataError(self.name, self.loader, problem, action)
            return {"kind": "combined", "epoch": -1, "num_batches": 0, "is_exhausted": False}
        if self._feed.kind in ("walked", "replayed"):  # their positions hold the random states of an epoch's start
            random_state = rng_state()
            self._feed.start(epoch)
            set_rng_state(random_state)
        return {
            "kind": self._feed.kind,
            "epoch": epoch,
            "num_batches": num_batches,
            "is_exhausted": False,
            **self._feed.position(num_batches),
        }

    def check(self, state: dict[str, Any], epoch: int) -> None:
        """Whether a run that goes on in ``epoch`` can go on from ``state``, whose tensors need not be read yet.

        Raises:
            DataError: the position belongs to another kind of loader, or to other data.
        """
        if state["kind"] != self._feed.kind:
            raise DataError(
                self.name,
                self.loader,
                f"resumes as {self._feed.kind!r}; the saved position is of a loader that resumes as {state['kind']!r}",
                "Pass the same kind of loader as in the saved run, or start a new run from its weights",
            )
        if 0 <= state["epoch"] == epoch and not state["is_exhausted"]:
            self._feed.check(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a position of :meth:`state_dict`; the next :meth:`start` goes on from there.

        Raises:
            DataError: the position belongs to another kind of loader.
        """
        self.check(state, epoch=-1)
        self._stored = state

    def _empty(self) -> DataError:
        return no_batch(self.name, self.loader)


def _failure_of_workers(error: BaseException, num_batches: int) -> tuple[str, str] | None:
    """What is wrong with the processes of a DataLoader, and what to do; None if ``error`` has another cause.

    Args:
        num_batches: how many batches of the epoch came before.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "DataLoader worker (pid" in text:
        problem = f"lost a worker process before batch {num_batches}; often the machine had no memory left ({error})"
        return problem, "Use fewer workers; num_workers=0 shows an error in the data set itself"
    if text.startswith("DataLoader timed out"):
        problem = f"has a timeout, and its workers gave no batch {num_batches} within it ({error})"
        return problem, "Raise timeout=, or use num_workers=0 to see which sample takes long"
    if text.startswith("Pin memory thread exited"):
        problem = f"lost the thread that pins its batches, before batch {num_batches} ({error})"
        return problem, "Pass pin_memory=False and num_workers=0 to see the error of the batch itself"
    return None


def _evaluated(loader: Any, name: str, world: World, pin_memory: bool) -> Any:
    """``loader`` as one rank would read it for an evaluation."""
    if isinstance(loader, CombinedLoader):
        whole = loader.mapped(lambda each: _evaluated(each, name, world, pin_memory))
        divide = {share_of(each, world).divided_by is not None for each in whole.flattened}
        if len(divide) == 2:
            problem = "joins loaders that divide themselves among the ranks with loaders that do not"
            raise DataError(
                name, loader, problem, "Let roomier divide all of them: shards_by_rank = False on the others"
            )
        return JointBatches(whole, shards_by_rank=True in divide)
    check_is_one_loader(loader, name)
    whole = without_padding(loader, name, world)
    return in_own_processes(whole, pin_memory) if isinstance(whole, DataLoader) else whole
