"""Agreement among ranks that does not wait for other ranks within a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.ranks import Ranks


class Vote:
    """Vote that computes the maximum of small integers over the ranks. Every rank must vote at the same points of its
    run.

    A vote is sent asynchronously and read at the next vote, so all ranks receive the outcome one vote later.

    Attributes:
        is_split: True if ``same`` was different on two ranks in a completed vote.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.is_split = False
        self._ranks = ranks
        self._sent: tuple[Any, Tensor] | None = None

    def cast(self, wishes: Sequence[int], same: int = 0) -> list[int] | None:
        """Send ``wishes`` without waiting.

        Args:
            wishes: integers that this rank proposes.
            same: number that must be equal on all ranks.

        Returns:
            The outcome of the previous vote; None for the first vote.
        """
        outcome = self._arrived()
        ballot = _ballot(wishes, same)
        self._sent = dist.all_reduce(ballot, dist.ReduceOp.MAX, async_op=True), ballot
        return outcome

    def settle(self, wishes: Sequence[int], same: int = 0) -> list[int]:
        """Wait for all ranks. Return the maximum of ``wishes`` over all ranks and over a vote that is still in
        progress."""
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
