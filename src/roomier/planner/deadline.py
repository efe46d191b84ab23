"""Until when plans are looked for: whoever waits for a run waits for its planning too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from roomier.core.errors import RoomierError

PLANNING = "ROOMIER_PLANNING_S"
"""Environment variable: the seconds of each search, in the place of those below."""

SEARCH_S = 120.0
"""For the fastest plan that fits."""
ADVICE_S = 60.0
"""For what would fit where nothing does."""
AFTER_OUT_OF_MEMORY_S = 20.0
"""For a smaller plan when a device ran out of memory, while other ranks wait in an exchange."""


@dataclass(frozen=True)
class Deadline:
    """A moment after which nothing new is looked at.

    Args:
        limit_s: from ``begun_s`` on.
        clock: tells the seconds that ``begun_s`` is one of.
    """

    limit_s: float
    begun_s: float
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def after(cls, limit_s: float) -> Deadline:
        """``limit_s`` from now on, or as many seconds as the user gives it in ``ROOMIER_PLANNING_S``.

        Raises:
            RoomierError: that is not a positive number.
        """
        given = os.environ.get(PLANNING)
        if given is not None:
            try:
                limit_s = float(given)
            except ValueError:
                limit_s = 0.0
            if not limit_s > 0:
                raise RoomierError(PLANNING, given, "is not a positive number of seconds", "Use 600, say")
        return cls(limit_s, time.perf_counter())

    @property
    def is_over(self) -> bool:
        return self.clock() - self.begun_s > self.limit_s

    def first_half(self) -> Deadline:
        """The same begin, and half of the time: for the first of two searches."""
        return Deadline(self.limit_s / 2, self.begun_s, self.clock)

    @property
    def longer(self) -> str:
        """How to look longer, as an action."""
        return f"Set {PLANNING}={max(600, round(5 * self.limit_s))} to look longer than {self.limit_s:g} s"
