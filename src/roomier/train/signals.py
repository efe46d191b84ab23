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
    """Inside, the first SIGINT or SIGTERM is noted in ``received``; a second one ends the process at once.

    Signals can only be caught in the main thread: elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
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
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self.received = signal.Signals(number)
        with suppress(RuntimeError):  # Python refuses to print from within a print that the signal interrupted
            notice(f"{self.received.name}: finishing this step, then saving (send it again to end at once)")
