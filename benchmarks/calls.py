"""Counts of library code in a step: stack frames between ``fit`` and ``training_step``, and function calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any


def folder_of(package: ModuleType) -> str:
    """Return the folder of ``package``, with a trailing separator."""
    assert package.__file__ is not None
    return os.path.dirname(os.path.abspath(package.__file__)) + os.sep


class FrameCount:
    """Probe that records the stack frames between ``training_step`` and ``fit`` in one step.

    Args:
        fit: code object of the method that the user called. The frame of this method and the frames of user code are
            not counted.
        folders: a frame is counted if its file is in one of these folders.
        at_index: index of the step in which the frames are recorded.

    Attributes:
        frames: ``file:function`` of each counted frame, outermost first.
    """

    def __init__(self, fit: CodeType, folders: tuple[str, ...], at_index: int) -> None:
        self.frames: list[str] = []
        self._fit = fit
        self._folders = folders
        self._at_index = at_index

    def __call__(self, index: int) -> None:
        if index != self._at_index:
            return
        training_step: FrameType = sys._getframe(1)
        frame = training_step.f_back
        found: list[str] = []
        while frame is not None and frame.f_code is not self._fit:
            path = frame.f_code.co_filename
            if path.startswith(self._folders):
                found.append(f"{self._shown(path)}:{frame.f_code.co_name}")
            frame = frame.f_back
        assert frame is not None, "fit did not call training_step"
        self.frames = found[::-1]

    def _shown(self, path: str) -> str:
        return next(path.removeprefix(folder) for folder in self._folders if path.startswith(folder))


class CallCount:
    """Probe that counts the Python calls into a library from the step ``first`` up to but not including the step
    ``last``.

    The counted steps should be an integer number of log intervals, so that calls in log steps are counted in proportion
    to their frequency. A call within ``training_step`` is counted only if it enters the library. A generator is counted
    each time it resumes.

    Args:
        folders: a function call is counted if the file of the function is in one of these folders.
        first: index of the first counted step.
        last: index of the first step after the counted steps.
    """

    def __init__(self, folders: tuple[str, ...], first: int, last: int) -> None:
        self.num_calls = 0
        self._folders = folders
        self._first = first
        self._last = last

    @property
    def per_step(self) -> float:
        """Number of counted calls per step."""
        return self.num_calls / (self._last - self._first)

    def __call__(self, index: int) -> None:
        if index == self._first:
            sys.setprofile(self._counter())
        elif index == self._last:
            sys.setprofile(None)

    def _counter(self) -> Callable[[FrameType, str, Any], None]:
        counts: dict[CodeType, bool] = {}  # whether calls of a function are counted

        def on_event(frame: FrameType, event: str, _: Any) -> None:
            if event != "call":
                return
            code = frame.f_code
            does_count = counts.get(code)
            if does_count is None:
                does_count = counts[code] = code.co_filename.startswith(self._folders)
            self.num_calls += does_count

        return on_event
