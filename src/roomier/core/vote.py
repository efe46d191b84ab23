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
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sent: tuple[Any, Tensor] | None = None

    def cast(self, wishes: Sequence[int]) -> list[int] | None:
        """Send ``wishes`` off.

        Returns:
            The outcome of the vote before; None where there was none.
        """
        outcome = self._arrived()
        ballot = torch.tensor(wishes, dtype=torch.int64)
        self._sent = dist.all_reduce(ballot, dist.ReduceOp.MAX, async_op=True), ballot
        return outcome

    def settle(self, wishes: Sequence[int]) -> list[int]:
        """The outcome over ``wishes`` and those that are under way; waits for all ranks."""
        before = self._arrived()
        ballot = torch.tensor(wishes, dtype=torch.int64)
        if not self._ranks.is_alone:
            dist.all_reduce(ballot, dist.ReduceOp.MAX)
        return [max(pair) for pair in zip(ballot.tolist(), before or wishes, strict=True)]

    def _arrived(self) -> list[int] | None:
        if self._sent is None:
            return None
        (work, ballot), self._sent = self._sent, None
        work.wait()
        return ballot.tolist()
