"""Which way of going on fits what the user passed."""

from collections.abc import Iterable
from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.world import World
from roomier.data.feeds import Feed, ListFeed, OrderedFeed, OwnGenerators, ReplayedFeed, StatefulFeed, WalkedFeed
from roomier.data.loaders import check_gives_batches, is_loader_collection
from roomier.data.rebuild import can_be_rebuilt, plain_sampler, rebuilt, with_ordered_sampler
from roomier.data.sampler import OrderedSampler, WalkedSampler
from roomier.data.seeding import EpochSeed, NumberSeededDataset, seeded_by_sample
from roomier.data.workers import OutlivesSignals


def evaluation_feed(loader: Any, *, name: str, pin_memory: bool) -> Feed:
    """The user's loader as it is: nothing of it is shuffled anew.

    Raises:
        DataError: ``loader`` gives no batches.
    """
    _check_is_one_loader(loader, name)
    if isinstance(loader, (list, tuple)):
        return ListFeed(loader, name=name)
    return _replayed(loader, name, pin_memory)


def training_feed(loader: Any, *, name: str, seed: int, world: World, shuffle_allowed: bool, pin_memory: bool) -> Feed:
    """The feed that resumes ``loader`` at the least cost. For the arguments, see :class:`Source`.

    Raises:
        DataError: ``loader`` gives no batches, or is several loaders.
    """
    _check_is_one_loader(loader, name)
    if isinstance(loader, (list, tuple)):
        return ListFeed(loader, name=name)
    if speaks_state(loader):
        return StatefulFeed(loader, loader, name=name)
    if not isinstance(loader, DataLoader):
        return ReplayedFeed(loader, name=name)
    if isinstance(loader.dataset, IterableDataset):
        # Workers read ahead in copies of the dataset: its state here would say nothing about theirs.
        if not loader.num_workers and speaks_state(loader.dataset):
            return StatefulFeed(loader, loader.dataset, name=name)
        return _replayed(loader, name, pin_memory)
    if not can_be_rebuilt(loader):
        notice(
            f"{name}: {type(loader).__name__} iterates in its own way, so its sampler stays; a resume in the "
            "middle of an epoch will read and drop the batches that were done."
        )
        return ReplayedFeed(loader, name=name)
    changes = _changes(loader, name, pin_memory)
    sampler = plain_sampler(loader)
    if sampler is not None:
        return _ordered(loader, sampler, changes, name, seed, world, shuffle_allowed)
    if not shuffle_allowed:
        notice(f"{name}: its order is that of its own sampler, which roomier cannot keep from shuffling.")
    return _walked(loader, changes, name, seed)


def speaks_state(loader: object) -> TypeGuard[Any]:
    """Whether ``loader`` has the two methods of :class:`SpeaksState`."""
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(loader, method, None)) for method in methods)


def _check_is_one_loader(loader: Any, name: str) -> None:
    if is_loader_collection(loader):
        raise DataError(
            name,
            loader,
            f"is {len(loader)} loaders, and one is read here",
            "Pass one loader; to mix data sets, join them: torch.utils.data.ConcatDataset",
        )
    check_gives_batches(loader, name)


def _replayed(loader: Any, name: str, pin_memory: bool) -> Feed:
    changes = {}
    if isinstance(loader, DataLoader) and can_be_rebuilt(loader):
        changes = _process_changes(loader, pin_memory)
    return ReplayedFeed(rebuilt(loader, **changes) if changes else loader, name=name)


def _process_changes(loader: DataLoader[Any], pin_memory: bool) -> dict[str, Any]:
    """What a loader's processes do differently here; no batch depends on it."""
    changes: dict[str, Any] = {}
    if pin_memory:
        changes["pin_memory"] = True
    if loader.num_workers:
        changes["worker_init_fn"] = OutlivesSignals(loader.worker_init_fn)
    return changes


def _changes(loader: DataLoader[Any], name: str, pin_memory: bool) -> dict[str, Any]:
    changes = _process_changes(loader, pin_memory)
    if loader.num_workers and not loader.in_order:
        notice(f"{name}: in_order=False has no position to resume from; batches are given in order.")
        changes["in_order"] = True
    return changes


def _ordered(
    loader: DataLoader[Any],
    own_sampler: RandomSampler | SequentialSampler,
    changes: dict[str, Any],
    name: str,
    seed: int,
    world: World,
    shuffle_allowed: bool,
) -> Feed:
    num_samples = _num_samples(own_sampler, loader, name)
    shuffle = False
    if isinstance(own_sampler, RandomSampler) and shuffle_allowed:
        shuffle = True
        if own_sampler.generator is not None:
            # Who gave a generator of their own chose the order by its seed.
            seed = own_sampler.generator.initial_seed()
    sampler = OrderedSampler(num_samples, shuffle=shuffle, seed=seed, world=world)
    epoch_seed = None
    if loader.num_workers:
        epoch_seed = EpochSeed()
        changes["dataset"] = seeded_by_sample(loader.dataset, epoch_seed)
    batching = loader.batch_sampler
    batch_size, drop_last = 1, False
    if isinstance(batching, BatchSampler):
        batch_size, drop_last = batching.batch_size, batching.drop_last
    return OrderedFeed(
        with_ordered_sampler(loader, sampler, **changes),
        sampler,
        name=name,
        batch_size=batch_size,
        drop_last=drop_last,
        own_generators=OwnGenerators(loader),
        epoch_seed=epoch_seed,
    )


def _num_samples(sampler: RandomSampler | SequentialSampler, loader: DataLoader[Any], name: str) -> int:
    action = "Give the dataset a __len__ that counts its samples"
    try:
        num_samples = len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise DataError(name, loader.dataset, "is a map-style dataset without a length", action) from error
    if not num_samples:
        raise DataError(name, loader.dataset, "has no samples", "Pass a dataset that has some")
    return num_samples


def _walked(loader: DataLoader[Any], changes: dict[str, Any], name: str, seed: int) -> Feed:
    epoch_seed = None
    if loader.num_workers:
        epoch_seed = EpochSeed()
        changes["dataset"] = NumberSeededDataset(loader.dataset, epoch_seed)
    index_sampler: Iterable[Any]
    field, index_sampler = (
        ("sampler", loader.sampler) if loader.batch_sampler is None else ("batch_sampler", loader.batch_sampler)
    )
    sampler = WalkedSampler(index_sampler, numbered=epoch_seed is not None)
    changes[field] = sampler
    return WalkedFeed(
        rebuilt(loader, **changes),
        sampler,
        name=name,
        own_generators=OwnGenerators(loader),
        seed=seed,
        epoch_seed=epoch_seed,
    )
