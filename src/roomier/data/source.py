"""Source, which yields the batches of one loader in each epoch and provides a position for checkpoints.

If the ranks read different numbers of batches, some ranks wait forever, so a Source compares the lengths of the loaders
of all ranks (:func:`check_lengths`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from roomier.core.device.rng import preserved_rng
from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.data import torch_loaders
from roomier.data.batch_feeds import ListFeed, ReplayedFeed, length_of
from roomier.data.choose import SourceOptions, check_is_one_loader, in_own_processes, no_batch, training_feed
from roomier.data.combined import CombinedLoader, JointBatches
from roomier.data.combined_feed import CombinedFeed
from roomier.data.feeds import Feed
from roomier.data.rebuild import parts_of, plain_sampler, set_loader_epoch, with_sampler
from roomier.data.share import SAME_LOADER, Reading, Share, no_batch_on, share_of
from roomier.data.turns import Turn, Turns, without_padding
from roomier.data.workers import end_with_signals


@dataclass
class _Running:
    """State of the epoch that is being read."""

    epoch: int
    num_batches: int
    is_exhausted: bool = False


class Source:
    """Batches of one loader for a training or evaluation loop, with a position.

    The source reads a batch only when the loop requests the batch. If a dataset draws from the global generators, their
    states in a checkpoint therefore match the position. Only worker processes of a DataLoader read ahead.

    To resume a saved run, call ``load_state_dict(state)``, restore the global generators, and call ``start(epoch)``
    with the epoch of the position. If some batches of that epoch are done, the iterator begins after them, and
    ``start`` does not change the global generators. If the epoch of the position was complete, call ``start`` with the
    next epoch. ``start`` then draws the same random numbers from the global generators as the saved run.

    The position depends on the loader:

    - List or tuple of batches: an index.
    - DataLoader with torch's own batching, in order or with ``shuffle=True``: a sample of the global order.
      :class:`OrderedSampler` replaces its sampler. The loader resumes immediately with any batch size. In worker
      processes, the random numbers of each sample depend only on (seed, epoch, index).
    - DataLoader with a different sampler: a number of batches. To resume, roomier iterates over the sampler without
      loading data.
    - Loader with ``state_dict`` and ``load_state_dict``: its own state, a dict of plain values and tensors.
    - Any other iterable: a number of batches. To resume, roomier reads and discards these batches, and prints a notice.
      A generator can be read only for one epoch.
    - :class:`CombinedLoader`: the position of each of its loaders, and the index of the current pass over each loader.
      The loaders of a CombinedLoader draw from separate random states instead of the global generators.

    At the start of each epoch, ``set_epoch(epoch)`` is called on the loader, its dataset and its samplers if they have
    this method. In evaluation, ``set_epoch`` of the dataset is not called.

    With several ranks, all ranks share one global order. For a DataLoader with torch's own batching, each rank reads
    its samples of this order (:class:`OrderedSampler`). For any other loader, each rank reads every ``N``-th batch,
    unless the loader shards its own data (:func:`roomier.data.share.share_of`). All ranks receive the same number of
    batches, and positions are valid for a different number of ranks.

    Args:
        loader: loader that the user passed.
        name: name of the argument that the user passed, such as ``"train_dataloaders"``, for errors.
        seed: seed for the order and for the random numbers of samples. The seed of rank 0 is used on all ranks.
        ranks: ranks that share the data; a single rank by default.
        draws_order: if True, and the loader has ``shuffle=True``, use the order that torch's sampler draws on rank 0 at
            the start of each epoch. By default, the order depends only on (seed, epoch). Loaders in a
            :class:`CombinedLoader` ignore this argument.
        shuffle_allowed: if False, read a loader with ``shuffle=True`` in sequential order, for overfitting on a few
            batches.
        training: True for a training loop. In evaluation, the user's sampler is not replaced.
        allows_empty: True to accept a training loader with the length 0.
        pin_memory: True to make a DataLoader yield batches in pinned memory, for a run on a CUDA device.
        num_in_round: number of samples in a batch of all ranks if roomier creates the order; None for the batch size of
            the loader on each rank.

    Attributes:
        loader: the argument ``loader``.
        name: the argument ``name``.
        ahead: iterator that the next :meth:`start` returns, if the loop created it before the hooks of the epoch.

    Raises:
        DataError: ``loader`` does not yield batches, or :attr:`num_batches` is 0. ``allows_empty`` allows the length
            0 of the loader itself.

    Example:
        >>> source = Source(loader, name="train_dataloaders", seed=0)
        >>> for batch in source.start(epoch=0):
        ...     ...
        ...     state = source.state_dict()  # resume with load_state_dict(state) and start(0)
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
        allows_empty: bool = False,
        pin_memory: bool = False,
        num_in_round: int | None = None,
    ) -> None:
        self.loader = loader
        self.name = name
        self._ranks = ranks = ranks or Ranks()
        self._is_training = training
        self._turns: Turns | None = None
        self._reports_dropped = True
        self._feed: Feed
        is_empty = allows_empty and length_of(loader) == 0
        options = SourceOptions(seed, ranks, shuffle_allowed, pin_memory, draws_order, num_in_round)
        check_lengths(loader, name, ranks, training=training)
        if training:
            self._feed = training_feed([] if is_empty else loader, name, options)
        else:  # the user's sampler determines the order, because roomier creates no order for an evaluation
            whole = _evaluated(loader, name, options)
            kind = ListFeed if isinstance(whole, (list, tuple)) else ReplayedFeed
            self._feed = kind(whole, Reading(name, Share(), ranks, seed))
            if not ranks.is_alone:
                self._turns = Turns(whole, Reading(name, share_of(whole, ranks.world), ranks, ranks.from_zero(seed)))
        if self._feed.num_batches == 0 and not is_empty:
            raise no_batch(name, loader)
        # A run does not terminate workers that the user started before the run.
        self._kept_before = [(each, torch_loaders.kept_iterator(each)) for each in self._loaders_read()]
        self._running: _Running | None = None
        self._batches: Generator[Any, None, None] | None = None
        self._unread: Iterator[Any] | None = None  # iterator of the loader, until _batches reads it
        self.ahead: Iterator[Any] | None = None
        self._announced: int | None = None
        self._stored: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        """Kind of the position that :meth:`state_dict` returns."""
        return self._feed.kind

    @property
    def num_batches(self) -> int | float:
        """Number of batches in a full epoch. Training counts the batches of this rank, and evaluation counts the
        batches of all ranks.

        The value is ``inf`` if the loader has no length.
        """
        return self._feed.num_batches if self._turns is None else self._turns.num_batches

    @property
    def follow_each_other(self) -> bool:
        """True if training reads several loaders one after another (mode ``"sequential"``)."""
        return isinstance(self._feed, CombinedFeed) and self._feed.mode == "sequential"

    @property
    def part_lengths(self) -> list[int | float]:
        """Number of batches in one pass over each loader, counted as in :attr:`num_batches`."""
        return self._feed.part_lengths if isinstance(self._feed, CombinedFeed) else [self.num_batches]

    def limit_parts(self, limits: Sequence[float]) -> None:
        """Set the maximum number of batches of each loader in mode ``"sequential"``. Call this before ``start``."""
        assert isinstance(self._feed, CombinedFeed)
        self._feed.limit_parts(limits)

    @property
    def may_end_apart(self) -> bool:
        """True if there can be fewer batches than :attr:`num_batches`, or if ranks can end after different numbers of
        batches."""
        return self._feed.may_end_apart

    @property
    def num_batches_done(self) -> int:
        """Number of batches of the current epoch that were yielded, by this run or by the run that this run resumes.

        After a resume with a different batch size, the number is ``num_batches`` minus the remaining batches.
        """
        return self._running.num_batches if self._running else 0

    def start(self, epoch: int) -> Iterator[Any]:
        """Return an iterator over the host batches of ``epoch``, counted from 0, or over the batches after a loaded
        position.

        Raises:
            DataError: the loader can be iterated only once and was iterated before, or the loaded position does not
                match this loader. If the loader is empty, the first ``next`` raises the error.
        """
        if self.ahead is not None:
            batches, self.ahead = self.ahead, None
            return batches
        stored, self._stored = self._stored, None
        running = _Running(epoch, 0)
        if self._announced != epoch:
            self.announce(epoch)
        self._announced = None
        if stored is None or stored["epoch"] != epoch:
            if stored is not None and stored["epoch"] >= 0:
                self._feed.adopt(stored, is_complete=stored["is_exhausted"])
            iterator = self._feed.start(epoch)
        else:
            with preserved_rng():
                iterator, running.num_batches = self._resume(stored)
        self._running = running
        self._unread = iterator if self._feed.reading is None else self._feed.reading
        self._batches = self._count(iterator, running, self._unread)
        return self._batches

    def announce(self, epoch: int) -> None:
        """Call ``set_epoch(epoch)``. :meth:`start` then does not call it again, so a hook can set another value before
        ``start``."""
        self._announced = epoch
        for loader in self.loader.flattened if isinstance(self.loader, CombinedLoader) else (self.loader,):
            set_loader_epoch(loader, epoch, training=self._is_training)

    def turns(self, limit: float, epoch: int = 0) -> Iterator[Turn]:
        """Return an iterator over the forward passes of this rank in an evaluation; see [Note: turns].

        Args:
            limit: maximum number of batches for all ranks together.
            epoch: epoch that ``set_epoch`` receives.

        Raises:
            DataError: the loader is empty, or the ranks cannot share the loader.
        """
        if self._turns is None:
            batches = islice(self.start(epoch), None if limit == math.inf else int(limit))
            return (Turn(batch, number) for number, batch in enumerate(batches))
        self.announce(epoch)
        self._running, self._unread = _Running(epoch, 0), None
        turns = self._turns(limit)
        self._batches = self._count(turns, self._running, turns)
        return self._batches

    def sample_indices(self, first_batch: int, num_batches: int) -> list[int] | None:
        """Return the dataset indices of this rank's samples in the given batches of the current epoch.

        Returns None if roomier does not create the order.
        """
        return self._feed.sample_indices(first_batch, num_batches)

    def empty_on(self, ranks: Sequence[int]) -> DataError:
        """Return the error for an epoch in which ``ranks`` have no batch. The caller raises the error only if
        :attr:`may_end_apart` is True.
        """
        return no_batch_on(ranks, self.name, self.loader)

    def report_dropped(self, counts: Sequence[int], batch_idx: int) -> None:
        """Print a notice if the epoch ends because the loader of a rank ended, although other ranks have batches left.
        The notice is printed once, and only if the number of batches was unknown.

        Args:
            counts: number of batches of each rank after ``batch_idx`` batches, up to the size of an optimizer step.
        """
        if self._reports_dropped and math.isinf(self.num_batches):
            self._reports_dropped = False
            ended = [rank for rank, count in enumerate(counts) if count == min(counts)]
            notice(
                f"{self.name}: the loader of rank {', '.join(map(str, ended))} ended after {batch_idx + min(counts)} "
                "batches. The epoch ends on all ranks when the first loader ends, so the remaining batches of the "
                "other ranks are dropped. To use all data, provide the same number of batches on each rank"
            )

    def end_epoch(self) -> None:
        """Mark the current epoch as ended, even if this rank has batches left."""
        if self._running is not None:
            self._running.is_exhausted = True

    def close(self) -> None:
        """End the iteration of the current epoch, and terminate its worker processes unless they are persistent."""
        if self._batches is not None:
            self._batches.close()
        if self._unread is not None:  # closing a generator that was never read does not end its workers
            torch_loaders.end_workers(self._unread)
        self._unread = self.ahead = None

    def end(self) -> None:
        """Terminate every worker process that this source started, including persistent workers, at the end of a run.

        Without this call, the workers would run until no reference to the source, or to the error that ended the run,
        remains. The garbage collector would wait 5 s for each worker, and torch would report the exit of any other
        child process as the exit of a worker.
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

    def _count(self, iterator: Iterator[Any], running: _Running, opened: Iterator[Any]) -> Generator[Any, None, None]:
        self._unread = None
        if running.num_batches == 0 and self._feed.begin_reading is not None:
            self._feed.begin_reading()
        try:
            for batch in iterator:
                running.num_batches += 1
                yield batch
        except BaseException as error:
            failure = _failure_of_workers(error, running.num_batches)
            if failure is not None:
                end_with_signals()
            torch_loaders.end_workers(opened)
            if isinstance(iterator, Generator):
                iterator.close()
            if failure is None:
                raise
            raise DataError(self.name, self.loader, *failure) from error
        running.is_exhausted = True
        # The loop does not check before each batch that all ranks have a batch.
        is_checked = (
            self._is_training and self.may_end_apart and not (self._ranks.is_alone and self._ranks.peers.is_alone)
        )
        if running.num_batches == 0 and not is_checked:
            raise no_batch(self.name, self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded: nested dicts of numbers, text and tensors.

        Every rank must call this method at the same time. The result is identical on all ranks. ``epoch`` is -1 before
        the first ``start``. ``num_samples``, which counts samples of the global order, is present if roomier replaced
        the sampler.
        """
        if self._stored is not None:
            return self._stored
        running = self._running
        if running is None:
            return self._position(-1, 0)
        is_at_end = running.num_batches >= self._feed.num_batches or self._feed.has_ended
        return self._position(running.epoch, running.num_batches, is_exhausted=running.is_exhausted or is_at_end)

    def _position(self, epoch: int, num_batches: int, *, is_exhausted: bool = False) -> dict[str, Any]:
        state = {"kind": self._feed.kind, "epoch": epoch, "num_batches": num_batches, "is_exhausted": is_exhausted}
        # The position of the feed overrides num_batches with the number of batches of all ranks.
        return state if epoch < 0 else {**state, **self._feed.position(num_batches)}

    def position_behind(self, epoch: int, num_batches: int) -> dict[str, Any]:
        """Return a position in the format of :meth:`state_dict`, for a run that saved no position.

        The position contains the current random state as the state at the start of the epoch.

        Args:
            epoch: index of the epoch that contains the position, counted from 0.
            num_batches: number of batches of this epoch that are done on each rank.

        Raises:
            DataError: the position is within an epoch over several loaders, each of which needs its own position.
        """
        if self._feed.kind == "combined":
            if num_batches:
                problem = (
                    f"would resume after {num_batches} batches of an epoch, but its loaders have no saved position"
                )
                action = "Resume from a checkpoint at the end of an epoch, or start a new run from the weights"
                raise DataError(self.name, self.loader, problem, action)
            return self._position(-1, 0)
        if self._feed.kind in ("walked", "replayed"):
            # The position requires the random states at the start of an epoch, which ``start`` saves.
            with preserved_rng():
                self._feed.start(epoch)
        return self._position(epoch, num_batches)

    def check(self, state: dict[str, Any], epoch: int) -> None:
        """Check that a run can resume in ``epoch`` from ``state``, whose tensors need not be loaded yet.

        Raises:
            DataError: the position belongs to a different kind of loader, or to different data.
        """
        if state["kind"] != self._feed.kind:
            problem = f"is a loader of kind {self._feed.kind!r}, but the position was saved for kind {state['kind']!r}"
            action = "Pass the same kind of loader as in the saved run, or start a new run from its weights"
            raise DataError(self.name, self.loader, problem, action)
        if 0 <= state["epoch"] == epoch and not state["is_exhausted"]:
            self._feed.check(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a position from :meth:`state_dict`. The next call of :meth:`start` resumes at this position.

        Raises:
            DataError: the position belongs to a different kind of loader.
        """
        self.check(state, epoch=-1)
        self._stored = state


def _failure_of_workers(error: BaseException, num_batches: int) -> tuple[str, str] | None:
    """Return the problem and the action for an error from a DataLoader's workers; None for any other error.

    Args:
        error: exception that the loader's iterator raised.
        num_batches: number of batches of the epoch that were read before the error.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "DataLoader worker (pid" in text:
        problem = (
            f"a DataLoader worker exited before batch {num_batches}, often because the machine ran out of memory "
            f"({error})"
        )
        return problem, "Use fewer workers. Set num_workers=0 to see errors that the dataset raises"
    if text.startswith("DataLoader timed out"):
        problem = f"its workers did not return batch {num_batches} within the timeout of the loader ({error})"
        return problem, "Increase timeout, or set num_workers=0 to find the slow sample"
    if text.startswith("Pin memory thread exited"):
        problem = f"the thread that pins its batches exited before batch {num_batches} ({error})"
        return problem, "Set pin_memory=False and num_workers=0 to see the error of the batch"
    return None


def _evaluated(loader: Any, name: str, options: SourceOptions) -> Any:
    """Return ``loader`` as a single rank would read it in an evaluation."""
    if isinstance(loader, CombinedLoader):
        whole = loader.mapped(lambda each: _evaluated(each, name, options))
        divide = {share_of(each, options.ranks.world).divided_by is not None for each in whole.flattened}
        if len(divide) == 2:
            problem = "combines loaders that shard themselves across ranks with loaders that do not"
            action = (
                "Set shards_by_rank = False on the loaders that shard themselves, so that roomier shards all loaders"
            )
            raise DataError(name, loader, problem, action)
        return JointBatches(whole, shards_by_rank=True in divide or None)
    check_is_one_loader(loader, name)
    single: Any = without_padding(loader, name, options.ranks.world)
    if not options.shuffle_allowed and isinstance(single, DataLoader) and plain_sampler(single) is not None:
        single = with_sampler(single, SequentialSampler(single.dataset))  # type: ignore[arg-type]
    return in_own_processes(single, options.pin_memory) if isinstance(single, DataLoader) else single


def check_lengths(loader: Any, name: str, ranks: Ranks, *, training: bool) -> None:
    """Compare the lengths of ``loader`` on all ranks. A loader without a length is not checked.

    Every rank must call this function. In training, each epoch has as many batches as the shortest loader, and roomier
    prints a notice if the lengths differ. During an evaluation, the ranks take turns with the batches of one loader.
    Different lengths therefore raise an error in an evaluation, unless the loader shards its own data.

    Args:
        loader: loader of this rank.
        name: name of the argument that the user passed, for errors and notices.
        ranks: ranks whose loaders are compared.
        training: True for a training loader; False for an evaluation loader.

    Raises:
        DataError: the lengths differ in an evaluation, or a loader is empty on some ranks only. The error is raised on
            every rank and contains the lengths on all ranks.
    """
    if ranks.is_alone:
        return
    parts = {name: loader}
    if isinstance(loader, CombinedLoader):
        parts = {f"{name}{part}": each for part, each in zip(loader.part_names, loader.flattened, strict=True)}
    divided_by = [_divided_by(each, ranks.world, training) for each in parts.values()]
    of_ranks = ranks.gather(
        [(length_of(each), by is None) for each, by in zip(parts.values(), divided_by, strict=True)]
    )
    check_counts([len(of_rank) for of_rank in of_ranks], name, loader)
    for part, each, by, of_part in zip(parts, parts.values(), divided_by, zip(*of_ranks, strict=True), strict=True):
        lengths, are_whole = zip(*of_part, strict=True)
        if len(set(are_whole)) > 1:
            problem = f"shards itself across ranks, but not on rank {are_whole.index(True)}"
            action = "Create the loader in train_dataloader(), which runs on each rank after the ranks have started"
            raise DataError(part, each, problem, action)
        if 0 in lengths and any(lengths):
            raise no_batch_on([rank for rank, length in enumerate(lengths) if length == 0], part, each)
        if len(set(lengths)) == 1 or math.inf in lengths:
            continue
        problem = f"has {_by_rank(lengths, 'batches')}"
        if training:
            notice(f"{part}: {problem}; each epoch has as many batches as the shortest loader. {SAME_LOADER}")
        elif by is None:
            raise DataError(
                part, each, f"{problem}, but the ranks take turns with the batches of one loader", SAME_LOADER
            )


def _divided_by(loader: Any, world: World, training: bool) -> str | None:
    if not training and any(isinstance(part, DistributedSampler) for part in parts_of(loader)):
        return DistributedSampler.__name__  # an evaluation replaces it, so it can be created for other ranks
    return share_of(loader, world).divided_by


def check_counts(counts: Sequence[int], name: str, loaders: Any) -> None:
    """Check that every rank has the same number of loaders.

    Raises:
        DataError: the numbers differ.
    """
    if len(set(counts)) > 1:
        raise DataError(name, loaders, f"has {_by_rank(counts, 'loaders')}", "Pass the same loaders on every rank")


def _by_rank(numbers: Sequence[float], unit: str) -> str:
    return ", ".join(f"{number} {unit} on rank {rank}" for rank, number in enumerate(numbers))
