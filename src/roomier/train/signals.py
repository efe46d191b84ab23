"""SIGTERM and Ctrl-C end a run at the next save point, not in the middle of a step."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from roomier.core.log import notice

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop:
    """Inside, the first SIGINT or SIGTERM is noted; a second one ends the process at once.

    Signals can only be caught in the main thread: elsewhere this does nothing.

    Args:
        is_alone: there are no other ranks that must obey it at the same step.

    Attributes:
        noted: what this process got.
        received: what the run obeys: what was noted, where there are several ranks once all know of it.
    """

    def __init__(self, is_alone: bool = True) -> None:
        self.noted: signal.Signals | None = None
        self.received: signal.Signals | None = None
        self._is_alone = is_alone
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self.noted = signal.Signals(number)
        if self._is_alone:
            self.received = self.noted
        with suppress(RuntimeError):  # Python refuses to print from within a print that the signal interrupted
            notice(f"{self.noted.name}: finishing this step, then saving (send it again to end at once)")
