"""Profilers that the ``profiler`` argument selects: ``"simple"`` and ``"advanced"``, with Lightning's names."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roomier.core.errors import RoomierError

_NAMES = ("simple", "advanced", "pytorch", "torch")
_LINES = 40  # maximum number of functions in each report of "advanced"


class SimpleProfiler:
    """Profiler that measures the duration of each action on the host: reading batches, steps, updates and hooks.

    ``with trainer.profiler.profile(name)`` measures an action of the user's code.

    Attributes:
        durations_s: durations of each action in seconds, in the order in which the actions ended.
    """

    def __init__(self) -> None:
        self.durations_s: dict[str, list[float]] = {}
        self._start_s = 0.0

    def start_run(self) -> None:
        """Discard earlier durations. The total time in the report starts at this call."""
        self.durations_s.clear()
        self._start_s = time.perf_counter()

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        """Measure an action. The duration of an action includes nested actions."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.durations_s.setdefault(action_name, []).append(time.perf_counter() - start_s)

    def summary(self) -> str:
        """Return a table with one line per action. The action with the longest total time is first."""
        total_s = max(time.perf_counter() - self._start_s, 1e-9)
        rows = sorted(((sum(all_s), len(all_s), name) for name, all_s in self.durations_s.items()), reverse=True)
        lines = [f"{'action':60} {'calls':>8} {'mean':>11} {'total':>11} {'share':>7}"]
        lines += [
            f"{name:60} {calls:8d} {own_s / calls * 1e3:8.3f} ms {own_s:9.3f} s {own_s / total_s:7.1%}"
            for own_s, calls, name in rows
        ]
        return "\n".join([*lines, f"{'the call':60} {'':8} {'':11} {total_s:9.3f} s"])


class AdvancedProfiler:
    """Profiler that measures all Python functions of this process with cProfile. Each action has one report of the
    functions that it calls.

    Attributes:
        reports: the profile of each action.
    """

    def __init__(self) -> None:
        self.reports: dict[str, cProfile.Profile] = {}
        self._is_active = False

    def __reduce__(self) -> tuple[type[AdvancedProfiler], tuple[()]]:
        return AdvancedProfiler, ()  # a profile of cProfile cannot be copied

    def start_run(self) -> None:
        """Discard earlier profiles."""
        self.reports.clear()

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        """Profile an action. A nested action is part of the outer action, because cProfile cannot run two profiles at
        the same time."""
        if self._is_active:
            yield
            return
        report = self.reports.setdefault(action_name, cProfile.Profile())
        self._is_active = True
        report.enable()
        try:
            yield
        finally:
            report.disable()
            self._is_active = False

    def summary(self) -> str:
        """Return a report for each action: the functions that it called, in descending order of cumulative time."""
        texts = []
        for name, report in self.reports.items():
            text = io.StringIO()
            pstats.Stats(report, stream=text).strip_dirs().sort_stats("cumulative").print_stats(_LINES)
            texts.append(f"{name}\n{text.getvalue().strip()}\n")
        return "\n".join(texts)


def profiler_of(value: Any) -> Any:
    """Return the profiler for the ``profiler`` argument of the Trainer.

    Raises:
        RoomierError: the value is neither a known name nor a profiler.
    """
    if value == "simple":
        return SimpleProfiler()
    if value == "advanced":
        return AdvancedProfiler()
    if isinstance(value, str) and value in _NAMES:
        return value
    is_class = isinstance(value, type)
    if isinstance(value, torch.profiler.profile) or (callable(getattr(value, "profile", None)) and not is_class):
        return value
    action = "Use 'simple', 'advanced', 'pytorch', a torch.profiler.profile object, or a Lightning profiler"
    raise RoomierError("profiler", value, "is not a known profiler", action)
