"""SIGTERM and Ctrl-C end a run at the next save point, not in the middle of a step."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

from roomier.core.log import notice

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TO_OBEY_S = 10.0  # in which a process that is not stuck obeys a second signal


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
        self._watch: _Watch | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
            self._watch = None if self._is_alone else _Watch()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted is not None:
            if self._watch is not None:
                self._watch.is_obeyed = True
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise SystemExit(128 + number)
        self.noted = signal.Signals(number)
        if self._is_alone:
            self.received = self.noted
        with suppress(RuntimeError):  # Python refuses to print from within a print that the signal interrupted
            notice(f"{self.noted.name}: finishing this step, then saving (send it again to end at once)")


class _Watch:
    """Ends a process that cannot obey a second signal.

    [Note: signals in a collective]
    Python calls handlers of signals between two lines of the main thread. One that waits in a collective for a rank
    that will not come is between no lines until the collective gives up, minutes later. What the interpreter does at
    once, in any thread, is to write the number of the signal into the file of ``signal.set_wakeup_fd``. A process that
    is forked meanwhile, a worker of a loader, lets go of that file: its signals are its own.

    Attributes:
        is_obeyed: the handler was called for the second one.
    """

    open: ClassVar[_Watch | None] = None

    def __init__(self) -> None:
        self.is_obeyed = False
        self._is_closed = threading.Event()
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._outer, _Watch.open = _Watch.open, self
        self._thread = threading.Thread(target=self._run, name="roomier-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        _Watch.open = self._outer
        self._is_closed.set()
        # The thread finds that nothing more will come: closed alone, it would wait for workers that have a copy.
        self._written.shutdown(socket.SHUT_WR)
        self._written.close()
        self._thread.join()
        self._read.close()

    def _run(self) -> None:
        numbers: list[int] = []
        while len(numbers) < 2:
            told = self._read.recv(16)
            if not told:
                return
            numbers += [number for number in told if number in _SIGNALS]
        if not (self._is_closed.wait(TO_OBEY_S) or self.is_obeyed):
            print("roomier: ended by a second signal, within a call that did not return", file=sys.stderr, flush=True)
            os._exit(128 + numbers[-1])


def _let_go_in_child() -> None:
    if _Watch.open is not None:
        signal.set_wakeup_fd(-1)
        _Watch.open = None


os.register_at_fork(after_in_child=_let_go_in_child)
