"""The batches of a loader that belong to this rank, if roomier does not create the order of the samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from roomier.core.errors import DataError
from roomier.core.world import World

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
            DataError: a loader that shards itself was saved with a different number of ranks, so the number of
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
                f"Resume with {before} ranks, or start a new run from the weights of the checkpoint",
            )
        return own


def no_batch_on(ranks: Sequence[int], name: str, loader: Any) -> DataError:
    """Return the error for a loader that is empty on ``ranks`` but not on all ranks."""
    on_ranks = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return DataError(name, loader, f"yields no batches on {on_ranks}, but every rank requires a batch", SAME_LOADER)
