"""Determine whether the user's code already shards a loader across ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from roomier.core.errors import DataError
from roomier.core.world import World
from roomier.data.rebuild import can_be_rebuilt, parts_of
from roomier.data.share import Share

SHARD_MARK = "shards_by_rank"
_ASKS_FOR_RANK = {"get_rank", "get_world_size", "get_node_local_rank", "RANK", "WORLD_SIZE", "LOCAL_RANK"}

# Names of the sampler attributes that contain the rank and the number of ranks, in torch, accelerate and Megatron.
_PLACES = (("rank", "num_replicas"), ("process_index", "num_processes"), ("data_parallel_rank", "data_parallel_size"))


def share_of(loader: object, world: World) -> Share:
    """Determine whether ``loader`` shards its samples across ranks, or roomier must assign its batches to ranks.

    A loader with a ``DistributedSampler`` shards itself. For any other loader, the ``shards_by_rank`` attribute of the
    loader, its dataset or its samplers determines the result. If this attribute is not set, the loader shards itself in
    these cases:

    - A sampler was created for this rank.
    - Hugging Face's ``split_dataset_by_node`` was applied to the loader or its dataset.
    - The code of a sampler or a stream contains a name that refers to the rank, such as ``get_rank``.

    Raises:
        DataError: a ``DistributedSampler`` was created for a different rank or number of ranks.
    """
    if world.size == 1:
        return Share()
    for part in parts_of(loader):
        if isinstance(part, DistributedSampler):
            _check_made_for(part, world)
            return Share(world, type(part).__name__, keeps_order=type(part) is DistributedSampler)
    parts = (*parts_of(loader), getattr(loader, "dataset", None))
    for part in parts:
        says = getattr(part, SHARD_MARK, None)
        if says is not None:
            return Share(world, f"{type(part).__name__} ({SHARD_MARK}={says})" if says else None)
    for part in parts:
        # split_dataset_by_node sets this attribute of Hugging Face's IterableDataset.
        if getattr(part, "_distributed", None) is not None:
            return Share(world, f"{type(part).__name__} (split_dataset_by_node)")
    for part in _samplers(loader):
        places = [(getattr(part, rank, None), getattr(part, size, None)) for rank, size in _PLACES]
        if (world.rank, world.size) in places:
            return Share(world, f"{type(part).__name__} (created for this rank)")
    for part in (*_streams(loader), *_samplers(loader)):
        if _reads_rank(part):
            return Share(world, f"{type(part).__name__} (reads its rank)")
    return Share(world)


def _check_made_for(sampler: DistributedSampler[Any], world: World) -> None:
    made_for = (sampler.rank, sampler.num_replicas)
    if made_for != (world.rank, world.size):
        problem = f"was created for rank {made_for[0]} of {made_for[1]}, but this is rank {world.rank} of {world.size}"
        action = (
            "Create the sampler in train_dataloader(), which runs on each rank, or remove the sampler, so that roomier "
            "shards the data"
        )
        raise DataError("DistributedSampler", sampler, problem, action)


def _samplers(loader: object) -> Iterator[object]:
    """Yield the objects that provide the indices of ``loader``."""
    if isinstance(loader, DataLoader):
        yield from (part for part in parts_of(loader) if part is not loader and part is not loader.dataset)


def _streams(loader: object) -> Iterator[object]:
    """Yield the parts of ``loader`` whose own code determines the batches."""
    if isinstance(loader, DataLoader):
        if not can_be_rebuilt(loader):
            yield loader
        if isinstance(loader.dataset, IterableDataset):
            yield loader.dataset
    elif not isinstance(loader, (list, tuple)):
        yield loader


def _reads_rank(part: object) -> bool:
    """Return True if the code of ``part`` (its methods, or the body of a generator) refers to the rank."""
    codes = [code for code in (getattr(part, "gi_code", None),) if code is not None]
    for kind in type(part).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "typing"):
            continue
        codes += [each.__code__ for each in vars(kind).values() if isinstance(each, FunctionType)]
    return any(_names(code) & _ASKS_FOR_RANK for code in codes)


def _names(code: CodeType) -> set[Any]:
    found: set[Any] = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= _names(each)
    return found
