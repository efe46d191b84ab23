"""Comparison of the first batch of all ranks if every rank must read the same batches.

If roomier shards a loader, each rank takes every ``N``-th batch of an order that is identical on all ranks. A loader
that already yields a shard, or whose order differs between ranks, would lose samples without an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from roomier.core.errors import DataError, RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.tree import leaves
from roomier.core.wire import encode
from roomier.data.share import Share, no_batch_on

T = TypeVar("T")
_END = object()


@dataclass(frozen=True)
class FirstBatch:
    """Comparison of the first batch that is read in an epoch.

    Args:
        share: share of this rank.
        ranks: ranks that exchange one checksum. Every rank must read its first batch at the same time.
        name: name of the argument that the user passed, for errors.
        loader: the user's loader, for errors.
    """

    share: Share
    ranks: Ranks
    name: str
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
        share, size = self.share, self.ranks.world.size
        if size == 1 or share.is_declared:
            return
        sums = self.ranks.gather(None if batch is _END else checksum(batch))
        without = [rank for rank, each in enumerate(sums) if each is None]
        if 0 < len(without) < size:
            raise no_batch_on(without, self.name, self.loader)
        differs = len(set(sums)) > 1
        if share.divided_by is not None and not differs and not without:
            notice(
                f"{self.name}: all ranks received the same first batch, although {share.divided_by} shards the loader. "
                "If it does not, set shards_by_rank = False on the dataset, so that roomier shards it"
            )
        if share.divided_by is None and differs:
            other = next(rank for rank, each in enumerate(sums) if each != sums[0])
            problem = (
                f"has different first batches on ranks 0 and {other}, but each rank takes one of every {size} "
                "batches of one order, so samples would be lost. Either the loader already shards itself across ranks, "
                "or its order is not seeded equally on all ranks"
            )
            raise DataError(self.name, self.loader, problem, _action(self.loader))


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
