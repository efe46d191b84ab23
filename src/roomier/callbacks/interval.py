"""Time interval that ends at the same step on all ranks."""

from __future__ import annotations

import time

from roomier.core.ranks import Ranks


class Interval:
    """Time interval of ``length_s`` seconds, measured by the clock of rank 0. The interval restarts when it ends.

    The ranks do not communicate in every step. Rank 0 sets the number of steps until the next check. This number is
    half of the steps that fit into the remaining time at the recent speed. Therefore, an interval of any length
    requires only a few checks.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._began_s = self._checked_s = 0.0
        self._num_steps = self._num_until_check = 1

    def begin(self) -> None:
        """Start the interval."""
        self._began_s = self._checked_s = time.monotonic()
        self._num_steps = self._num_until_check = 1

    def is_over(self, ranks: Ranks) -> bool:
        """Return True if the interval has ended. Call this method in every step, on every rank."""
        self._num_until_check -= 1
        if self._num_until_check:
            return False
        is_over, self._num_until_check = ranks.from_zero(self._check(is_alone=ranks.is_alone))
        self._num_steps = self._num_until_check
        if is_over:
            self.begin()
        return is_over

    def _check(self, *, is_alone: bool) -> tuple[bool, int]:
        now_s = time.monotonic()
        left_s = self._length_s - (now_s - self._began_s)
        if left_s <= 0 or is_alone:
            return left_s <= 0, 1
        step_s = (now_s - self._checked_s) / self._num_steps
        self._checked_s = now_s
        return False, max(1, int(left_s / max(step_s, 1e-9) / 2))
