"""The global batch under another number of ranks: the same samples make a step, cut in another way."""

from __future__ import annotations

from dataclasses import dataclass

from roomier.core.errors import RoomierError


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step is made of.

    Args:
        batch_size: samples of a micro-batch; None where the loader alone knows, and it cannot be changed.
        accumulate: micro-batches of a step on each rank.
        num_ranks: ranks that take one each at a time.
    """

    batch_size: int | None
    accumulate: int
    num_ranks: int

    @property
    def size(self) -> int:
        """Samples of a step; micro-batches of a step where their size is not known."""
        return (self.batch_size or 1) * self.accumulate * self.num_ranks

    def on(self, num_ranks: int, batch_size: int | None) -> GlobalBatch:
        """The same batch on ``num_ranks``.

        Micro-batches stay as they are where their number can make up for the ranks; else they become smaller, by as
        little as possible: what fits into memory now does so then.

        Args:
            batch_size: that of the loader as it is now.

        Raises:
            RoomierError: it cannot be divided among so many; says among how many it can.
        """
        if self.batch_size is None or batch_size is None:
            whole = GlobalBatch(None, self.accumulate, self.num_ranks).size
            if whole % num_ranks:
                raise _indivisible(num_ranks, whole, "micro-batches")
            return GlobalBatch(None, whole // num_ranks, num_ranks)
        if self.size % num_ranks:
            raise _indivisible(num_ranks, self.size, "samples")
        of_rank = self.size // num_ranks
        fitting = next(size for size in range(min(batch_size, of_rank), 0, -1) if of_rank % size == 0)
        return GlobalBatch(fitting, of_rank // fitting, num_ranks)

    def __str__(self) -> str:
        samples = "" if self.batch_size is None else f" x {self.batch_size} samples"
        return f"{self.num_ranks} ranks x {self.accumulate} micro-batches{samples}"


def _indivisible(num_ranks: int, size: int, unit: str) -> RoomierError:
    working = [number for number in range(1, 2 * num_ranks + 1) if size % number == 0]
    return RoomierError(
        "devices",
        num_ranks,
        f"the {size} {unit} of a step cannot be divided evenly among {num_ranks} ranks",
        f"Restart on one of these numbers of ranks: {', '.join(map(str, working))}",
    )
