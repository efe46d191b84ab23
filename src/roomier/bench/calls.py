"""How much of a library runs for each step: frames on the way to ``training_step``, calls from one to the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any


def folder_of(package: ModuleType) -> str:
    assert package.__file__ is not None
    return os.path.dirname(os.path.abspath(package.__file__)) + os.sep


class FrameCount:
    """A probe that looks, once, at what lies on the stack between ``training_step`` and ``fit``.

    Args:
        fit: the code of the method the user called; its frame does not count, nor does the user's own.
        folders: frames of files below them count.

    Attributes:
        frames: ``file:function`` of each that counts, from the outermost in.
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
        assert frame is not None, "training_step did not run below fit"
        self.frames = found[::-1]

    def _shown(self, path: str) -> str:
        return next(path.removeprefix(folder) for folder in self._folders if path.startswith(folder))


class CallCount:
    """A probe that counts the Python calls into a library from the step ``first`` to the step ``last``.

    Choose a whole number of log intervals, so that what happens now and then is counted at its share. Calls within
    ``training_step`` itself count only where they end in the library. A generator counts each time it goes on.

    Args:
        folders: calls of functions in files below them count.
        exclude: but not those below this one (the benchmark's own).
    """

    def __init__(self, folders: tuple[str, ...], first: int, last: int, exclude: str | None = None) -> None:
        self.num_calls = 0
        self._folders = folders
        self._exclude = exclude
        self._first = first
        self._last = last

    @property
    def per_step(self) -> float:
        return self.num_calls / (self._last - self._first)

    def __call__(self, index: int) -> None:
        if index == self._first:
            sys.setprofile(self._counter())
        elif index == self._last:
            sys.setprofile(None)

    def _counter(self) -> Callable[[FrameType, str, Any], None]:
        counts: dict[CodeType, bool] = {}  # whether a function's calls count

        def on_event(frame: FrameType, event: str, _: Any) -> None:
            if event != "call":
                return
            code = frame.f_code
            does_count = counts.get(code)
            if does_count is None:
                path = code.co_filename
                does_count = path.startswith(self._folders) and not (
                    self._exclude is not None and path.startswith(self._exclude)
                )
                counts[code] = does_count
            self.num_calls += does_count

        return on_event
