"""Time limits of the planner's searches, which delay the start of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from roomier.core.errors import RoomierError

PLANNING = "ROOMIER_PLANNING_S"
"""Environment variable that sets the maximum duration of each search in seconds. This value overrides the limits
below."""

SEARCH_S = 120.0
"""Time limit of the search for the fastest plan that fits, in seconds."""
ADVICE_S = 60.0
"""Time limit of the search for alternatives if no plan fits, in seconds."""
AFTER_OUT_OF_MEMORY_S = 20.0
"""Time limit of the search for a smaller plan after an out-of-memory error, in seconds. The other ranks wait for this
search."""


@dataclass(frozen=True)
class Deadline:
    """Point in time after which a search evaluates no further plans.

    Args:
        limit_s: maximum duration of the search in seconds.
        begun_s: value of ``clock`` when the search started.
        clock: function that returns the current time in seconds.
    """

    limit_s: float
    begun_s: float
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def after(cls, limit_s: float) -> Deadline:
        """Return a deadline that is ``limit_s`` seconds from now. The environment variable ``ROOMIER_PLANNING_S``
        overrides ``limit_s``.

        Raises:
            RoomierError: the value of ``ROOMIER_PLANNING_S`` is not a positive number.
        """
        given = os.environ.get(PLANNING)
        if given is not None:
            try:
                limit_s = float(given)
            except ValueError:
                limit_s = 0.0
            if not limit_s > 0:
                raise RoomierError(PLANNING, given, "must be a positive number of seconds", "Use a value such as 600")
        return cls(limit_s, time.perf_counter())

    @property
    def is_over(self) -> bool:
        """True if the time limit has passed."""
        return self.clock() - self.begun_s > self.limit_s

    def first_half(self) -> Deadline:
        """Return a deadline with the same start and half of the time limit, for the first of two searches."""
        return Deadline(self.limit_s / 2, self.begun_s, self.clock)

    @property
    def longer(self) -> str:
        """Advice for an error message on how to extend the time limit."""
        return f"Set {PLANNING}={max(600, round(5 * self.limit_s))} to search longer than {self.limit_s:g} s"
