"""Interleaved timing: what is compared takes turns, so that what slows the machine slows all of it alike."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Cost:
    """Of one step, in microseconds: on the clock, and of this thread's processor time.

    The clock is what a user waits for. Processor time is what is left of it where other processes get in the way; on a
    quiet machine and on the CPU both are the same.
    """

    wall_us: float
    cpu_us: float


def interleave(blocks: Mapping[str, Callable[[], Cost]], num_repeats: int) -> dict[str, list[Cost]]:
    """Each block ``num_repeats`` times, in turns, every second round backwards (a drift cancels out).

    Args:
        blocks: each runs once and returns what it measured of itself.

    Returns:
        The figures of each block in order; item ``i`` of all blocks comes from the same round.
    """
    found: dict[str, list[Cost]] = {name: [] for name in blocks}
    for index in range(num_repeats):
        names = list(blocks)
        for name in reversed(names) if index % 2 else names:
            gc.collect()  # no block pays for the garbage of the one before
            found[name].append(blocks[name]())
    return found


class Stamps:
    """Called once in each step, it notes both clocks. It costs well under a microsecond, in all that is compared."""

    def __init__(self) -> None:
        self._wall_ns: list[int] = []
        self._cpu_ns: list[int] = []

    def __call__(self, index: int) -> None:
        self._wall_ns.append(time.perf_counter_ns())
        self._cpu_ns.append(time.thread_time_ns())

    def cost(self, num_warmup: int, period: int) -> Cost:
        """The cost of a step behind the warm-up: for each of the ``period`` places of a step in a log interval the
        median, and of these the mean.

        So what happens every ``period`` steps counts at its share, and the steps in which another process took the
        processor do not count, as long as they are fewer than half.
        """
        return Cost(*(_typical_interval_us(stamps[num_warmup:], period) for stamps in (self._wall_ns, self._cpu_ns)))


def _typical_interval_us(stamps_ns: Sequence[int], period: int) -> float:
    intervals = [after - before for before, after in pairwise(stamps_ns)]
    end = len(intervals) // period * period
    return round(statistics.mean(statistics.median(intervals[i:end:period]) for i in range(period)) / 1e3, 3)


def median(values: Sequence[float]) -> float:
    """The median, to a thousandth: further digits of a time tell nothing."""
    return round(statistics.median(values), 3)


def median_difference(values: Sequence[float], base: Sequence[float], count: int = 1) -> float:
    """The difference of the medians, per one of ``count`` equal parts."""
    return round((statistics.median(values) - statistics.median(base)) / count, 3)


def quartiles_of_difference(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile of the differences within a round: how far one round may be trusted."""
    differences = [value - other for value, other in zip(values, base, strict=True)]
    if len(differences) == 1:
        return round(differences[0], 3), round(differences[0], 3)
    first, _, third = statistics.quantiles(differences, n=4, method="inclusive")
    return round(first, 3), round(third, 3)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread inside: the host's share of a small step is not blurred by waking others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def muted() -> Iterator[None]:
    """What is printed inside is written, at its full cost, to nowhere: standard output is for the result."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
