"""A stretch of time that ends at the same step on all ranks."""

from __future__ import annotations

import time

from roomier.core.ranks import Ranks


class Interval:
    """Says at steps whether ``length_s`` seconds have passed since it began; then it begins anew.

    The clock of rank 0 counts. The others do not ask it at every step: it tells how many steps it will take at least,
    half of what the pace so far promises, so that a few questions do for an interval of any length.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._began_s = self._asked_s = 0.0
        self._num_steps = self._num_until_asked = 1

    def begin(self) -> None:
        """Start to count here."""
        self._began_s = self._asked_s = time.monotonic()
        self._num_steps = self._num_until_asked = 1

    def is_over(self, ranks: Ranks) -> bool:
        """Called at every step, on every rank."""
        self._num_until_asked -= 1
        if self._num_until_asked:
            return False
        is_over, self._num_until_asked = ranks.from_zero(self._ask(is_alone=ranks.is_alone))
        self._num_steps = self._num_until_asked
        if is_over:
            self.begin()
        return is_over

    def _ask(self, *, is_alone: bool) -> tuple[bool, int]:
        now_s = time.monotonic()
        left_s = self._length_s - (now_s - self._began_s)
        if left_s <= 0 or is_alone:
            return left_s <= 0, 1
        step_s = (now_s - self._asked_s) / self._num_steps
        self._asked_s = now_s
        return False, max(1, int(left_s / max(step_s, 1e-9) / 2))
