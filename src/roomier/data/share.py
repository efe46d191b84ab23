"""Which batches of a loader are this rank's, where torch does not batch samples that roomier orders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from roomier.core.errors import DataError
from roomier.core.world import World

T = TypeVar("T")

ALONE = World()


@dataclass(frozen=True)
class Share:
    """Batches as units: rank ``r`` of ``N`` takes the batches ``r``, ``r + N``, ... of the order all ranks read alike.

    All ranks take the same number: the last ``num_batches % N`` of an epoch are left out. Positions count the batches
    of all ranks, so they hold under another number of ranks.

    Attributes:
        world: the place of this rank.
        divided_by: what gives each rank batches of its own, so that none is left out here; None for nothing.
        keeps_order: ``divided_by`` cuts one order that does not depend on the number of ranks.
    """

    world: World = ALONE
    divided_by: str | None = None
    keeps_order: bool = False

    @property
    def divides(self) -> bool:
        """Whether batches are left to other ranks here."""
        return self.world.size > 1 and self.divided_by is None

    def count(self, num_batches: int | float) -> int | float:
        """How many of ``num_batches`` that the loader gives are this rank's."""
        return num_batches // self.world.size if self.divides and math.isfinite(num_batches) else num_batches

    def of(self, batches: Iterable[T]) -> Iterator[T]:
        """This rank's of ``batches``, which are those of all ranks; what follows the last whole round is left out."""
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
        """How many batches this rank's loader has given at ``position``.

        Raises:
            DataError: the loader divides itself, and what it gave to another number of ranks is not known.
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
                f"is divided among the ranks by {divided_by}, so what {before} ranks read of this epoch cannot be "
                f"told on {size}",
                f"Resume on {before} ranks, or let roomier divide what all ranks read alike: take out {divided_by}",
            )
        return own
