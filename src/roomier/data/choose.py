"""Select the feed for the loader that the user passed."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from roomier.core.device.rng import mix_seed
from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.data.batch_feeds import BatchFeed, ListFeed, LitdataFeed, ReplayedFeed, StatefulFeed, WalkedFeed
from roomier.data.combined import CombinedLoader
from roomier.data.combined_feed import CombinedFeed
from roomier.data.feeds import Feed, OrderedFeed, OwnGenerators
from roomier.data.loaders import check_gives_batches, is_loader_collection
from roomier.data.rebuild import can_be_rebuilt, generators_of, plain_sampler, rebuilt, with_sampler
from roomier.data.sampler import DrawnOrder, OrderedSampler, RoundBatches, WalkedSampler
from roomier.data.seeding import EpochSeed, NumberSeededDataset, SampleSeededDataset
from roomier.data.share import Reading, Share, share_of
from roomier.data.workers import OutlivesSignals


@dataclass(frozen=True)
class LoaderPlace:
    """Position of a loader among several loaders that are read together. Each position has a different seed.

    Attributes:
        number: index of the loader.
        shares_generator: True if an earlier loader has the same generator.
    """

    number: int
    shares_generator: bool

    def own(self, seed: int) -> int:
        """Return the seed of this loader. The first loader keeps ``seed``."""
        return mix_seed(seed, self.number) if self.number else seed


@dataclass(frozen=True)
class SourceOptions:
    """Arguments of a :class:`Source` that determine the order of a loader, and the micro-batches of its ranks."""

    seed: int
    ranks: Ranks
    shuffle_allowed: bool = True
    pin_memory: bool = False
    draws_order: bool = False
    num_in_round: int | None = None


def training_feed(loader: Any, name: str, options: SourceOptions, place: LoaderPlace | None = None) -> Feed:
    """Create the kind of feed that resumes ``loader`` at the lowest cost.

    Args:
        place: position of ``loader`` among several loaders that are read together; None for a single loader.

    Raises:
        DataError: ``loader`` does not yield batches, or is a collection of loaders without a CombinedLoader.
    """
    if isinstance(loader, CombinedLoader):
        return _combined(loader, name, options)
    check_is_one_loader(loader, name)
    ranks, seed = options.ranks, options.ranks.from_zero(options.seed)
    if place is not None:
        seed = place.own(seed)
    how = Reading(name, share_of(loader, ranks.world), ranks, seed, draws_apart=place is not None)
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if is_map and can_be_rebuilt(loader) and not speaks_state(loader):
        changes = _changes(loader, name, options.pin_memory)
        sampler = plain_sampler(loader)
        if sampler is not None and how.share.divided_by is None:
            return _ordered(loader, sampler, changes, how, options, place)
        if not options.shuffle_allowed:
            notice(f"{name}: roomier cannot disable the shuffling of a custom sampler, so its order is used unchanged.")
        feed: BatchFeed = _walked(loader, changes, how)
    else:
        feed = _unordered(loader, how, options.pin_memory)
    _report_share(feed, how.share)
    return feed


def _unordered(loader: Any, how: Reading, pin_memory: bool) -> BatchFeed:
    """Return the feed for a loader whose order roomier can neither create nor draw again."""
    if isinstance(loader, (list, tuple)):
        return ListFeed(loader, how)
    dataset = getattr(loader, "dataset", None)
    if not has_shuffle_buffer(dataset):
        if speaks_state(loader):
            return (LitdataFeed if hasattr(dataset, "distributed_env") else StatefulFeed)(loader, how, loader)
        # Workers read ahead in copies of the dataset, so the dataset in this process does not have their state.
        is_stream = isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset) and not loader.num_workers
        if is_stream and speaks_state(dataset):
            return StatefulFeed(loader, how, dataset)
    if not isinstance(loader, DataLoader):
        return ReplayedFeed(loader, how)
    if isinstance(dataset, IterableDataset):
        return ReplayedFeed(in_own_processes(loader, pin_memory), how)
    notice(
        f"{how.name}: {type(loader).__name__} overrides __iter__ or __len__, so roomier does not replace its sampler. "
        "To resume within an epoch, roomier reads and discards the batches that are done."
    )
    return ReplayedFeed(loader, how)


def _combined(loader: CombinedLoader, name: str, options: SourceOptions) -> CombinedFeed:
    feeds: list[Feed] = []
    for number, (each, part_name) in enumerate(zip(loader.flattened, loader.part_names, strict=True)):
        own = generators_of(each)
        shared = [one for before in loader.flattened[:number] for one in generators_of(before) if _is_in(one, own)]
        feed = training_feed(each, f"{name}{part_name}", options, LoaderPlace(number, bool(shared)))
        if feed.num_batches == 0:
            raise no_batch(feed.name, each)
        feeds.append(feed)
    _check_draw_apart(loader, feeds)
    return CombinedFeed(loader, feeds, name=name, ranks=options.ranks)


def _check_draw_apart(loader: CombinedLoader, feeds: Sequence[Feed]) -> None:
    """Reject a generator from which two loaders draw alternately, because a resume cannot repeat these draws."""
    drawn = [_drawn_all_along(each, feed) for each, feed in zip(loader.flattened, feeds, strict=True)]
    for number, feed in enumerate(feeds):
        others = [one for i, other in enumerate(loader.flattened) if i != number for one in generators_of(other)]
        if any(_is_in(one, others) for one in drawn[number]):
            problem = "draws from the same random generator as another loader"
            raise DataError(
                feed.name, loader, problem, "Pass a separate torch.Generator to each loader and to its sampler"
            )


def _drawn_all_along(loader: Any, feed: Feed) -> list[torch.Generator]:
    """Return the generators from which ``loader`` draws while it is read."""
    if feed.kind == "walked":
        batching = loader.batch_sampler
        samplers = (loader.sampler, batching, getattr(batching, "sampler", None))
        found = [getattr(sampler, "generator", None) for sampler in samplers]
        return [each for each in found if isinstance(each, torch.Generator)]
    return generators_of(loader) if feed.kind in ("replayed", "stateful") else []


def _is_in(one: object, several: Sequence[object]) -> bool:
    return any(one is other for other in several)


def no_batch(name: str, loader: Any) -> DataError:
    """Return the error for a loader without batches."""
    action = (
        "Pass a loader with at least one batch. With drop_last=True, the dataset must have at least batch_size samples"
    )
    return DataError(name, loader, "yields no batches", action)


def _report_share(feed: BatchFeed, share: Share) -> None:
    """Print a notice about how ``feed`` is sharded across ranks."""
    num_ranks = share.world.size
    if share.divided_by is not None:
        notice(
            f"{feed.name}: {share.divided_by} already shards this loader across ranks, so roomier does not shard it "
            "again"
        )
    elif num_ranks > 1:
        reads_all = "reads all batches and " if feed.kind in ("replayed", "stateful") else ""
        notice(
            f"{feed.name}: roomier distributes full batches to {num_ranks} ranks. Each rank {reads_all}takes one of "
            f"every {num_ranks} batches. If fewer than {num_ranks} batches remain at the end of an epoch, they are "
            "dropped"
        )


def speaks_state(loader: object) -> TypeGuard[Any]:
    """Return True if ``loader`` has the two methods of :class:`SpeaksState`.

    The ``state_dict`` of a dataset of litdata or mosaicml-streaming requires arguments, so its state cannot be read.
    """
    state_dict = getattr(loader, "state_dict", None)
    if not callable(state_dict) or not callable(getattr(loader, "load_state_dict", None)):
        return False
    try:
        signature(state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # a built-in method without a signature
        return True
    return True


def has_shuffle_buffer(dataset: Any) -> bool:
    """Return True if ``dataset`` is a stream from the ``datasets`` package that passes its samples through a shuffle
    buffer.

    The state of such a dataset does not contain the samples in the buffer, so a run that resumes from this state would
    skip these samples.
    """
    parts = [getattr(dataset, "_ex_iterable", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ()))
        parts += [each for each in inner if each is not None]
    return False


def check_is_one_loader(loader: Any, name: str) -> None:
    """Check that ``loader`` is a single loader or a list of batches.

    Raises:
        DataError: ``loader`` is a collection of loaders, or does not yield batches.
    """
    if is_loader_collection(loader):
        problem = f"must be a single loader, but contains {len(loader)} loaders"
        raise DataError(name, loader, problem, "Pass one loader, or combine them with CombinedLoader(loaders, mode)")
    check_gives_batches(loader, name)


def in_own_processes(loader: DataLoader[Any], pin_memory: bool) -> DataLoader[Any]:
    """Return ``loader``, or a copy if a run requires different settings of worker processes or pinned memory."""
    changes = _process_changes(loader, pin_memory) if can_be_rebuilt(loader) else {}
    return rebuilt(loader, **changes) if changes else loader


def _process_changes(loader: DataLoader[Any], pin_memory: bool) -> dict[str, Any]:
    """Return the settings of ``loader`` that a run changes without affecting the batches."""
    changes: dict[str, Any] = {}
    if pin_memory:
        changes["pin_memory"] = True
    if loader.num_workers:
        changes["worker_init_fn"] = OutlivesSignals(loader.worker_init_fn)
    return changes


def _changes(loader: DataLoader[Any], name: str, pin_memory: bool) -> dict[str, Any]:
    changes = _process_changes(loader, pin_memory)
    if loader.num_workers and not loader.in_order:
        notice(f"{name}: a loader with in_order=False cannot be resumed, so roomier yields the batches in order.")
        changes["in_order"] = True
    return changes


def _ordered(
    loader: DataLoader[Any],
    own_sampler: RandomSampler | SequentialSampler,
    changes: dict[str, Any],
    how: Reading,
    options: SourceOptions,
    place: LoaderPlace | None,
) -> Feed:
    name, ranks, seed = how.name, how.ranks, how.seed
    num_samples = _num_samples(own_sampler, loader, name)
    shuffle, drawn = False, None
    if isinstance(own_sampler, RandomSampler) and options.shuffle_allowed:
        shuffle = True
        if options.draws_order and place is None:
            drawn = DrawnOrder(own_sampler.generator, ranks)
        if own_sampler.generator is not None:
            # If the user passed a generator, its seed determines the order.
            seed = ranks.from_zero(own_sampler.generator.initial_seed())
            if place is not None and place.shares_generator:
                seed = place.own(seed)
    batching = loader.batch_sampler
    batch_size, drop_last = 1, False
    if isinstance(batching, BatchSampler):
        batch_size, drop_last = batching.batch_size, batching.drop_last
    sampler = OrderedSampler(
        num_samples,
        shuffle=shuffle,
        seed=seed,
        world=ranks.world,
        num_in_round=options.num_in_round or batch_size * ranks.world.size,
        drop_last=drop_last,
        drawn=drawn,
    )
    num_left_out = num_samples - sampler.num_read_after(0)
    if num_left_out and not drop_last:
        notice(
            f"{name}: each epoch drops the last {num_left_out} of {num_samples} samples, because all ranks must read "
            "the same number of batches"
        )
    epoch_seed = EpochSeed() if loader.num_workers else None
    if epoch_seed is not None:
        changes["dataset"] = SampleSeededDataset(loader.dataset, epoch_seed)
    if options.num_in_round is None:
        loader_of_rank = with_sampler(loader, sampler, **changes)
    else:
        loader_of_rank = rebuilt(loader, batch_sampler=RoundBatches(sampler), **changes)
    return OrderedFeed(loader_of_rank, name, OwnGenerators(loader), sampler, epoch_seed)


def _num_samples(sampler: RandomSampler | SequentialSampler, loader: DataLoader[Any], name: str) -> int:
    action = "Define a method __len__ in the dataset that returns the number of samples"
    try:
        num_samples = len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise DataError(name, loader.dataset, "is a map-style dataset without a length", action) from error
    if not num_samples:
        raise DataError(name, loader.dataset, "has no samples", "Pass a dataset with at least one sample")
    return num_samples


def _walked(loader: DataLoader[Any], changes: dict[str, Any], how: Reading) -> BatchFeed:
    epoch_seed = EpochSeed() if loader.num_workers else None
    if epoch_seed is not None:
        changes["dataset"] = NumberSeededDataset(loader.dataset, epoch_seed)
    field = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = changes[field] = WalkedSampler(getattr(loader, field), numbered=epoch_seed is not None, share=how.share)
    return WalkedFeed(rebuilt(loader, **changes), how, OwnGenerators(loader), sampler, epoch_seed)
