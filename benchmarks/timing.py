"""Interleaved timing: the compared blocks alternate, so that load on the machine affects all of them equally."""

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
    """The time of one step in microseconds.

    The wall time is the time that a user waits. The CPU time excludes the time of other processes. On a CPU,
    if the machine runs no other work, both times are equal.

    Attributes:
        wall_us: wall time.
        cpu_us: CPU time of this thread.
    """

    wall_us: float
    cpu_us: float


def interleave(blocks: Mapping[str, Callable[[], Cost]], num_repeats: int) -> dict[str, list[Cost]]:
    """Run each block ``num_repeats`` times in alternation. Every second round runs in reverse order, so that slow
    changes of the machine's speed cancel out.

    Args:
        blocks: mapping from names to functions that run one measurement and return its cost.
        num_repeats: number of rounds.

    Returns:
        The costs of each block. The items ``i`` of all blocks are from the same round.
    """
    found: dict[str, list[Cost]] = {name: [] for name in blocks}
    for index in range(num_repeats):
        names = list(blocks)
        for name in reversed(names) if index % 2 else names:
            gc.collect()  # so that no block spends time on the garbage collection of the previous block
            found[name].append(blocks[name]())
    return found


class Stamps:
    """Probe that records the wall clock and the processor clock in each step. A call of the probe takes less than a
    microsecond."""

    def __init__(self) -> None:
        self._wall_ns: list[int] = []
        self._cpu_ns: list[int] = []

    def __call__(self, index: int) -> None:
        self._wall_ns.append(time.perf_counter_ns())
        self._cpu_ns.append(time.thread_time_ns())

    def cost(self, num_warmup: int, period: int) -> Cost:
        """Return the cost of a step: the median for each position in a log interval, averaged over the positions.

        Work that occurs every ``period`` steps is counted with its frequency. Interruptions by other processes do not
        affect the result if they occur in fewer than half of the steps at each position.

        Args:
            num_warmup: number of steps at the start that are not counted.
            period: number of steps per log interval.
        """
        return Cost(*(_typical_interval_us(stamps[num_warmup:], period) for stamps in (self._wall_ns, self._cpu_ns)))


def _typical_interval_us(stamps_ns: Sequence[int], period: int) -> float:
    intervals = [after - before for before, after in pairwise(stamps_ns)]
    end = len(intervals) // period * period
    return round(statistics.mean(statistics.median(intervals[i:end:period]) for i in range(period)) / 1e3, 3)


def median(values: Sequence[float]) -> float:
    """Return the median, rounded to a thousandth."""
    return round(statistics.median(values), 3)


def median_difference(values: Sequence[float], base: Sequence[float], count: int = 1) -> float:
    """Return the difference between the medians, divided by ``count``."""
    return round((statistics.median(values) - statistics.median(base)) / count, 3)


def quartiles_of_difference(values: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile of the differences within each round."""
    differences = [value - other for value, other in zip(values, base, strict=True)]
    if len(differences) == 1:
        return round(differences[0], 3), round(differences[0], 3)
    first, _, third = statistics.quantiles(differences, n=4, method="inclusive")
    return round(first, 3), round(third, 3)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because waking other threads adds noise to small steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def muted() -> Iterator[None]:
    """Redirect standard output and standard error to the null device."""
    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
        yield
