"""An agreement among ranks that no step waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.ranks import Ranks


class Vote:
    """What the ranks wish, in small integers, of which the largest counts; every rank must vote at the same places.

    A vote is sent off and read at the next one, when it has long arrived: what one rank wishes, all know one later.

    Attributes:
        is_split: what should be the same on all ranks was not, in a vote that has arrived.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.is_split = False
        self._ranks = ranks
        self._sent: tuple[Any, Tensor] | None = None

    def cast(self, wishes: Sequence[int], same: int = 0) -> list[int] | None:
        """Send ``wishes`` off.

        Args:
            same: a number that should be the same on all ranks.

        Returns:
            The outcome of the vote before; None where there was none.
        """
        outcome = self._arrived()
        ballot = _ballot(wishes, same)
        self._sent = dist.all_reduce(ballot, dist.ReduceOp.MAX, async_op=True), ballot
        return outcome

    def settle(self, wishes: Sequence[int], same: int = 0) -> list[int]:
        """The outcome over ``wishes`` and those that are under way; waits for all ranks."""
        before = self._arrived()
        ballot = _ballot(wishes, same)
        if not self._ranks.is_alone:
            dist.all_reduce(ballot, dist.ReduceOp.MAX)
        return [max(pair) for pair in zip(self._read(ballot), before or wishes, strict=True)]

    def _arrived(self) -> list[int] | None:
        if self._sent is None:
            return None
        (work, ballot), self._sent = self._sent, None
        work.wait()
        return self._read(ballot)

    def _read(self, ballot: Tensor) -> list[int]:
        *outcome, largest, negative_of_least = ballot.tolist()
        self.is_split = self.is_split or largest != -negative_of_least
        return outcome


def _ballot(wishes: Sequence[int], same: int) -> Tensor:
    return torch.tensor([*wishes, same, -same], dtype=torch.int64)
