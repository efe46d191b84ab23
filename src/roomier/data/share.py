"""The batches of a loader that belong to this rank, if roomier does not create the order of the samples.

The user's code may already shard a loader across ranks (:func:`share_of`). Otherwise, roomier shards it, and each rank
takes every ``N``-th batch of an order that is identical on all ranks. A loader that already yields a shard, or whose
order differs between ranks, would then lose samples without an error, so the ranks compare their first batches
(:class:`FirstBatch`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CodeType, FunctionType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from roomier.core.errors import DataError, RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.tree import leaves
from roomier.core.wire import encode
from roomier.core.world import World
from roomier.data.rebuild import can_be_rebuilt, parts_of

T = TypeVar("T")

ALONE = World()
SAME_LOADER = (
    "Pass the same loader on every rank, or a dataset with shards_by_rank = True if each rank has its own data"
)


@dataclass(frozen=True)
class Share:
    """Batches of one rank: rank ``r`` of ``N`` receives the batches ``r``, ``r + N``, ... of an order that is identical
    on all ranks.

    All ranks receive the same number of batches, so the last ``num_batches % N`` batches of an epoch are dropped.
    Positions count the batches of all ranks, so they are valid for a different number of ranks.

    Attributes:
        world: rank and number of ranks.
        divided_by: name of the object that already shards the loader across ranks, or None if no object does. If an
            object shards the loader, every batch of the loader belongs to this rank.
        keeps_order: True if ``divided_by`` shards one order that does not depend on the number of ranks.
        is_declared: True if the user set ``shards_by_rank``. The first batches of the ranks are not compared then.
    """

    world: World = ALONE
    divided_by: str | None = None
    keeps_order: bool = False
    is_declared: bool = False

    @property
    def divides(self) -> bool:
        """True if some batches of the loader belong to other ranks."""
        return self.world.size > 1 and self.divided_by is None

    def count(self, num_batches: int | float) -> int | float:
        """Return how many of ``num_batches`` batches of the loader belong to this rank."""
        return num_batches // self.world.size if self.divides and math.isfinite(num_batches) else num_batches

    def of(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of this rank from the batches of all ranks. If fewer batches than ranks remain for the last
        round, these batches are skipped.
        """
        if not self.divides:
            yield from batches
            return
        size, rank = self.world.size, self.world.rank
        own: list[T] = []
        for number, batch in enumerate(batches):
            if number % size == rank:
                own.append(batch)
            if number % size == size - 1:
                yield own.pop()

    def num_skipped(self, position: dict[str, Any], name: str, loader: object) -> int:
        """Return how many batches of this rank's loader are done at ``position``.

        Raises:
            DataError: a loader that shards its own data was saved with a different number of ranks, so the number of
                completed batches is unknown.
        """
        num_batches: int = position["num_batches"]
        size, before = self.world.size, position.get("num_ranks", 1)
        was_divided_by, kept_order = position.get("divided_by"), position.get("keeps_order", True)
        own, rest = (num_batches, 0) if self.divided_by is None else divmod(num_batches, size)
        is_known = kept_order and (self.divided_by is None or (self.keeps_order and not rest))
        if before != size and not is_known:
            divided_by = self.divided_by or was_divided_by
            raise DataError(
                name,
                loader,
                f"is sharded across ranks by {divided_by}, so a position within an epoch that was saved with {before} "
                f"ranks cannot be used with {size} ranks",
                f"Resume with {before} ranks or from a checkpoint at the end of an epoch, or start a new run from the "
                "weights of the checkpoint",
            )
        return own


def no_batch_on(ranks: Sequence[int], name: str, loader: Any) -> DataError:
    """Return the error for a loader that is empty on ``ranks`` but not on all ranks."""
    on_ranks = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return DataError(name, loader, f"yields no batches on {on_ranks}, but every rank requires a batch", SAME_LOADER)


_END = object()


@dataclass(frozen=True)
class Reading:
    """Settings with which the batches of a loader are read, if roomier does not create the order of the samples.

    Attributes:
        name: name of the argument that the user passed, for errors and notices.
        share: share of the batches that this rank reads.
        ranks: ranks that read the loader.
        seed: seed of the random numbers that must be identical on all ranks.
        draws_apart: if True, the loader's code uses separate random states, so that its random numbers do not depend on
            other code, such as a second loader.
    """

    name: str
    share: Share
    ranks: Ranks
    seed: int
    draws_apart: bool = False


@dataclass(frozen=True)
class FirstBatch:
    """Comparison of the first batch that is read in an epoch.

    Args:
        how: settings. Its ranks exchange one checksum, so every rank must read its first batch at the same time.
        loader: the user's loader, for errors.
    """

    how: Reading
    loader: Any

    def compared(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the elements of ``batches``. When the first one is read, compare it with the other ranks.

        Raises:
            DataError: see :meth:`compare`.
        """
        first: Any = next(batches, _END)
        self.compare(first)
        if first is not _END:
            yield first
            yield from batches

    def compare(self, batch: Any) -> None:
        """Compare ``batch``, or the indices of a batch, with the other ranks.

        Raises:
            DataError: roomier shards the loader, and the batches differ, or some ranks have no batch.
        """
        name, share, ranks = self.how.name, self.how.share, self.how.ranks
        size = ranks.world.size
        if size == 1 or share.is_declared:
            return
        sums = ranks.gather(None if batch is _END else checksum(batch))
        without = [rank for rank, each in enumerate(sums) if each is None]
        if 0 < len(without) < size:
            raise no_batch_on(without, name, self.loader)
        differs = len(set(sums)) > 1
        if share.divided_by is not None and not differs and not without:
            notice(
                f"{name}: all ranks received the same first batch, although {share.divided_by} shards the loader. "
                "If it does not, set shards_by_rank = False on the dataset, so that roomier shards it"
            )
        if share.divided_by is None and differs:
            other = next(rank for rank, each in enumerate(sums) if each != sums[0])
            problem = (
                f"has different first batches on ranks 0 and {other}, but each rank takes one of every {size} "
                "batches of one order, so samples would be lost. Either the loader already shards itself across ranks, "
                "or its order is not seeded equally on all ranks"
            )
            raise DataError(name, self.loader, problem, _action(self.loader))


def _action(loader: Any) -> str:
    if isinstance(loader, (list, tuple)):
        action = "Create the same list on every rank, for example after seed_everything(0)"
        return f"{action}, or pass a DataLoader whose dataset has shards_by_rank = True if each rank has its own data"
    return (
        "If it shards itself, set shards_by_rank = True on the dataset. Otherwise, seed its order. If the batches "
        "differ only by random augmentation, set shards_by_rank = False"
    )


def checksum(batch: Any) -> int:
    """Return the CRC-32 of the tensors, arrays, numbers and text in ``batch``. Objects of other types are skipped."""
    total = 0
    for leaf in leaves(batch):
        if isinstance(leaf, np.ndarray):
            leaf = str(leaf) if leaf.dtype.hasobject else leaf.tobytes()
        with suppress(RoomierError, RuntimeError):  # a nested tensor raises a RuntimeError
            total = zlib.crc32(encode(leaf.as_subclass(Tensor) if isinstance(leaf, Tensor) else leaf), total)
    return total


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

    A loader with a ``DistributedSampler`` shards its own data. For any other loader, the ``shards_by_rank`` attribute
    of the loader, its dataset or its samplers determines the result; if it is False, streams of litdata read the shards
    of all ranks. If this attribute is not set, the loader shards its own data in these cases:

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
            return Share(world, divided_by, is_declared=bool(says) or _reads_all(part))
    for part in parts:
        # split_dataset_by_node sets this attribute of Hugging Face's IterableDataset.
        if getattr(part, "_distributed", None) is not None:
            return Share(world, f"{type(part).__name__} (split_dataset_by_node)")
    of_streams = [(part, _stored_places(part)) for part in _streams(loader)]
    samplers = [part for part in parts_of(loader) if part is not loader and part is not parts[-1]]
    of_all: list[tuple[object, list[Any]]] = [*of_streams, *((part, []) for part in samplers)]
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


def _reads_all(stream: object) -> bool:
    """Make the litdata streams in ``stream`` read the shards of all ranks. Return False if ``stream`` still stores a
    rank, as a stream of mosaicml-streaming does."""
    streams = list(_with_inner(stream))
    for place in (getattr(each, "distributed_env", None) for each in streams):
        if place is not None:
            vars(place).update(global_rank=0, world_size=1, num_nodes=1)
    return all(size == 1 for each in streams for _, size in _stored_places(each))


def _check_made_for(part: object, made_for: tuple[int, int], world: World) -> None:
    if made_for != (world.rank, world.size):
        problem = f"was created for rank {made_for[0]} of {made_for[1]}, but this is rank {world.rank} of {world.size}"
        action = (
            "Create the loader in train_dataloader(), which runs on each rank after the ranks have started, for rank "
            "trainer.data_rank of trainer.num_data_ranks. If it has a DistributedSampler, remove the sampler instead, "
            "so that roomier shards the data"
        )
        raise DataError(type(part).__name__, part, problem, action)


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
