"""Graceful stop: SIGTERM and Ctrl-C end a run at the next save point instead of within a step. In a SLURM job, SIGUSR1
does the same, because job scripts for Lightning select this signal. A notice of preemption counts as SIGTERM."""

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
from roomier.launch.preemption import Preemption, PreemptionThread, await_restart_by_ray, source_of

REQUEUES = getattr(signal, "SIGUSR1", signal.SIGTERM)  # Windows has no SIGUSR1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, REQUEUES)
TO_OBEY_S = 10.0  # time in which a process must react to a second signal


class GracefulStop:
    """Context in which the first signal is recorded. A second signal terminates the process immediately.

    Python can handle signals only in the main thread. In other threads, this context reacts only to preemption.

    Args:
        is_alone: True if no other ranks must stop at the same step.
        polls: True if this process asks for notices of preemption.

    Raises:
        RoomierError: the source of notices is unknown.

    Attributes:
        noted: the signal that this process received.
        preemption: the notice of preemption that this process received.
        received: the signal that stops the run. With several ranks, this value is set on all ranks at the same step
            after one rank has received a signal.
    """

    def __init__(self, is_alone: bool = True, *, polls: bool = False) -> None:
        self.noted: signal.Signals | None = None
        self.preemption: Preemption | None = None
        self.received: signal.Signals | None = None
        source = source_of(os.environ)
        self._is_alone, self._poll = is_alone, source if polls else None
        self._thread: PreemptionThread | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._watch: _ExitThread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            requeues = "SLURM_JOB_ID" in os.environ and signal.getsignal(REQUEUES) is signal.SIG_DFL
            numbers = _SIGNALS if requeues else _SIGNALS[:2]
            self._before = {number: signal.signal(number, self._note) for number in numbers}
            self._watch = None if self._is_alone else _ExitThread()
        if self._poll is not None:
            self._thread = PreemptionThread(self._poll, self._preempt)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._thread is not None:
            self._thread.close()
            self._thread = None
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
        self._stop(signal.Signals(number))
        with suppress(RuntimeError):  # printing fails if the signal interrupted another print
            name = signal.Signals(number).name
            notice(f"{name}: the run ends after this step (send the signal again to exit immediately)")

    def _preempt(self, preemption: Preemption) -> None:
        self.preemption = preemption
        if self.noted is None:
            self._stop(signal.SIGTERM)
        end = "" if preemption.stops_at is None else f" at {preemption.stops_at:%H:%M:%S %Z}"
        notice(f"{preemption.source}: this machine stops{end}, so the run ends after this step", every_rank=True)

    def _stop(self, number: signal.Signals) -> None:
        self.noted = number
        if self._is_alone:
            self.received = number


def exit_of(number: int) -> SystemExit:
    """Return the exception that ends this process after the signal ``number``. A worker of Ray Train waits until Ray
    ends this process; see :func:`roomier.launch.preemption.await_restart_by_ray`."""
    await_restart_by_ray()
    return SystemExit(128 + number)


class _ExitThread:
    """Thread that terminates a process that cannot react to a second signal.

    [Note: signals in a collective]
    Python calls signal handlers between two bytecode instructions of the main thread. If the main thread waits in a
    collective for a rank that does not respond, it runs no bytecode instructions until the collective times out after
    minutes. However, the interpreter immediately writes the signal number to the file descriptor of
    ``signal.set_wakeup_fd``, and this thread reads the number. A process that is forked while the thread runs, such as
    a loader worker, stops using that file descriptor, because the process receives separate signals.

    Attributes:
        is_obeyed: True if Python called the handler for the second signal.
    """

    open: ClassVar[_ExitThread | None] = None

    def __init__(self) -> None:
        self.is_obeyed = False
        self._is_closed = threading.Event()
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._outer, _ExitThread.open = _ExitThread.open, self
        self._thread = threading.Thread(target=self._run, name="roomier-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and restore the previous wakeup file descriptor."""
        signal.set_wakeup_fd(self._before)
        _ExitThread.open = self._outer
        self._is_closed.set()
        # Shut down the socket, so that the thread reads an end-of-file. Closing the socket is not sufficient if a
        # forked worker has a copy of it.
        self._written.shutdown(socket.SHUT_WR)
        self._written.close()
        self._thread.join()
        self._read.close()

    def _run(self) -> None:
        numbers: list[int] = []
        while len(numbers) < 2:
            received = self._read.recv(16)
            if not received:
                return
            numbers += [number for number in received if number in _SIGNALS]
        if not (self._is_closed.wait(TO_OBEY_S) or self.is_obeyed):
            print("roomier: exiting after a second signal during a blocked call", file=sys.stderr, flush=True)
            os._exit(128 + numbers[-1])


def _close_in_child() -> None:
    if _ExitThread.open is not None:
        signal.set_wakeup_fd(-1)
        _ExitThread.open = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
