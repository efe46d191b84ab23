"""Determine whether the user's code already shards a loader across ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from roomier.core.errors import DataError
from roomier.core.world import World
from roomier.data.rebuild import can_be_rebuilt, parts_of
from roomier.data.share import Share

SHARD_MARK = "shards_by_rank"
_ASKS_FOR_RANK = {
    *("get_rank", "get_world_size", "get_node_local_rank", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    *("split_by_node", "pytorch_worker_seed"),  # functions of webdataset
}

# Names of the attributes that contain the rank and the number of ranks, in torch, user code, accelerate and Megatron.
_PLACES = (
    *(("rank", "num_replicas"), ("rank", "world_size"), ("process_index", "num_processes")),
    ("data_parallel_rank", "data_parallel_size"),
)
# The same names for an object that a stream of litdata or mosaicml-streaming stores.
_STORED_PLACES = (("global_rank", "world_size"), ("rank", "num_ranks"))
_MOST_PARTS = 100  # A longer list is treated as data, such as file names.


def share_of(loader: object, world: World) -> Share:
    """Determine whether ``loader`` shards its samples across ranks, or roomier must assign its batches to ranks.

    A loader with a ``DistributedSampler`` shards itself. For any other loader, the ``shards_by_rank`` attribute of the
    loader, its dataset or its samplers determines the result. If this attribute is not set, the loader shards itself in
    these cases:

    - A sampler or a stream was created for this rank, as the streams of litdata and mosaicml-streaming are.
    - Hugging Face's ``split_dataset_by_node`` was applied to the loader or its dataset.
    - The code of a sampler, a stream, or a stage of a stream contains a name that refers to the rank, such as
      ``get_rank`` or webdataset's ``split_by_node``.

    Raises:
        DataError: a ``DistributedSampler`` or a stream was created for a different rank or number of ranks.
    """
    if world.size == 1:
        return Share()
    for part in parts_of(loader):
        if isinstance(part, DistributedSampler):
            _check_made_for(part, (part.rank, part.num_replicas), world)
            return Share(world, type(part).__name__, keeps_order=type(part) is DistributedSampler)
    parts = (*parts_of(loader), getattr(loader, "dataset", None))
    for part in parts:
        says = getattr(part, SHARD_MARK, None)
        if says is not None:
            divided_by = f"{type(part).__name__} ({SHARD_MARK}={says})" if says else None
            return Share(world, divided_by, is_declared=True)
    for part in parts:
        # split_dataset_by_node sets this attribute of Hugging Face's IterableDataset.
        if getattr(part, "_distributed", None) is not None:
            return Share(world, f"{type(part).__name__} (split_dataset_by_node)")
    of_streams = [(part, _stored_places(part)) for part in _streams(loader)]
    of_all: list[tuple[object, list[Any]]] = [*of_streams, *((part, []) for part in _samplers(loader))]
    for part, stored in of_all:
        places = [(getattr(part, rank, None), getattr(part, size, None)) for rank, size in _PLACES]
        if (world.rank, world.size) in (*places, *stored):
            return Share(world, f"{type(part).__name__} (created for this rank)")
        for place in stored:
            if place[1] > 1:
                _check_made_for(part, place, world)
    for part, _ in of_all:
        if _reads_rank(part):
            return Share(world, f"{getattr(part, '__name__', type(part).__name__)} (reads its rank)")
    return Share(world)


def _check_made_for(part: object, made_for: tuple[int, int], world: World) -> None:
    if made_for != (world.rank, world.size):
        problem = f"was created for rank {made_for[0]} of {made_for[1]}, but this is rank {world.rank} of {world.size}"
        action = (
            "Create the loader in train_dataloader(), which runs on each rank after the ranks have started. If it has "
            "a DistributedSampler, remove the sampler instead, so that roomier shards the data"
        )
        raise DataError(type(part).__name__, part, problem, action)


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
            yield from _with_inner(loader.dataset)
    elif not isinstance(loader, (list, tuple)):
        yield from _with_inner(loader)


def _with_inner(stream: object, depth: int = 4) -> Iterator[object]:
    """Yield ``stream``, the streams that it reads, and the functions in its list of stages (webdataset)."""
    yield stream
    for value in getattr(stream, "__dict__", {}).values() if depth else ():
        if isinstance(value, (IterableDataset, DataLoader)):
            yield from _with_inner(value, depth - 1)
        for stage in islice(value, _MOST_PARTS) if isinstance(value, (list, tuple)) else ():
            if isinstance(stage, (IterableDataset, DataLoader)):
                yield from _with_inner(stage, depth - 1)
            elif isinstance(stage, (FunctionType, partial)):
                yield getattr(stage, "func", stage)


def _stored_places(stream: object) -> list[tuple[int, int]]:
    """Return the ranks and numbers of ranks for which ``stream`` was created."""
    stored = [each.__dict__ for each in getattr(stream, "__dict__", {}).values() if hasattr(each, "__dict__")]
    places = [(each.get(rank), each.get(size)) for each in stored for rank, size in _STORED_PLACES]
    return [(rank, size) for rank, size in places if isinstance(rank, int) and isinstance(size, int)]


def _reads_rank(part: object) -> bool:
    """Return True if the code of ``part`` (its methods, the body of a generator or a function) refers to the rank."""
    if getattr(part, "__name__", None) in _ASKS_FOR_RANK:
        return True
    codes = [code for name in ("gi_code", "__code__") if isinstance(code := getattr(part, name, None), CodeType)]
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
