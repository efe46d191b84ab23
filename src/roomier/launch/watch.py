"""Processes that watch each other, so that all ranks end together: a process watches the ranks that it started, and
these ranks watch this process."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from roomier.core.log import notice
from roomier.launch.failure import FailureNews

_POLL_S = 0.1
_GRACE_S = 1.0  # Time after a failure until the other ranks are killed.
_MAIN_GRACE_S = 4.0  # Additional time until the process that started the ranks ends.
_LAST_S = 60.0  # Maximum time between the end of rank 0 and the end of the other ranks after a complete run.
# Exit codes of a run that a signal ended at a save point.
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + getattr(signal, "SIGUSR1", signal.SIGTERM))


class Children:
    """Ranks that this process started. If a rank fails, all ranks and this process end within seconds.

    Args:
        processes: processes of the started ranks, keyed by rank.

    Attributes:
        have_met: True if the process group of all ranks exists. Before the process group exists, the exit of a rank is
            a failure, even with exit code 0.
        may_lose: True if the run continues without ranks that a signal such as SIGKILL ended.
        main: failures of this process, and its current position in the run for messages; None before the rendezvous.
    """

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        self._processes = dict(processes)
        self._failed: tuple[int, int] | None = None
        self._is_ending = threading.Lock()
        self.have_met = self.may_lose = False
        self.main: FailureNews | None = None
        threading.Thread(target=self._watch, name="roomier-ranks", daemon=True).start()
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._end)

    def news(self) -> tuple[int, str] | None:
        """Return the number of a rank that has ended, and a description of its end; None if no rank has ended."""
        for rank, process in self._processes.items():
            if process.poll() is not None:
                return rank, self._how(process.returncode)
        return None

    def codes(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended, which are negative after a signal such as SIGKILL; empty
        if this process ends the run, because it then kills ranks itself."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {} if self._failed is not None else {rank: code for rank, code in codes.items() if code is not None}

    def keep(self, ranks: Sequence[int]) -> None:
        """Watch only the ``ranks`` that this process started, and number them by their positions in ``ranks``."""
        self._processes = {
            number: self._processes[rank] for number, rank in enumerate(ranks) if rank in self._processes
        }

    def _forget(self) -> None:  # a forked process, such as a worker of a DataLoader, did not start the ranks
        self._processes = {}
        atexit.unregister(self._end)

    def _watch(self) -> None:
        while self._processes and self._failed is None:
            if (failed := self._first_failed()) is not None:
                self._failed = failed
            else:
                time.sleep(_POLL_S)
        if self._failed is not None:
            self._wait(_GRACE_S)
            self._kill()
            time.sleep(_MAIN_GRACE_S)
            self._end_badly()

    def _end(self) -> None:
        """Wait until the ranks end, and kill ranks that do not end in time. Python calls this method when this process
        exits."""
        if self.main is not None and self.main.is_failing:
            self._wait(_GRACE_S)
            self._kill()
            return
        if self._failed is None:
            self._wait(_LAST_S)
        if self._failed is None and (late := [rank for rank, each in self._processes.items() if each.poll() is None]):
            problem = f"these ranks were still running {_LAST_S:g} s after rank 0 had ended, and were killed: {late}"
            notice(problem, every_rank=True)
            self._kill()
            _exit(1)
        self._failed = self._failed or self._first_failed()  # the watching thread may not have detected a failure yet
        if self._failed is not None:
            self._kill()
            self._end_badly()

    def _first_failed(self) -> tuple[int, int] | None:
        good = (0, *_STOPPED) if self.have_met and not (self.main is not None and self.main.has_lost_peer) else ()
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and code not in good and not (self.may_lose and code < 0):
                return rank, code
        return None

    def _end_badly(self) -> None:
        self._is_ending.acquire()  # this lock is never released, so that only one thread prints the last line
        assert self._failed is not None
        if self.main is not None and self.main.is_failing:
            _exit(1)
        rank, code = self._failed
        name = f"rank {rank}" if self.main is None else self.main.describe(rank)
        notice(f"{name} {self._how(code)}, so the run ended", every_rank=True)
        _exit(128 - code if code < 0 else max(code, 1))

    def _how(self, code: int) -> str:
        if code == 0:
            where = self.main.where() if self.main is not None and self.have_met else "before all ranks had joined"
            return f"{ended(code)} {where}".rstrip()
        return ended(code)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(each.poll() is None for each in self._processes.values()):
            if self._failed is not None:
                until = min(until, time.monotonic() + _GRACE_S)
            time.sleep(0.02)

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()


def ended(code: int) -> str:
    """Describe the end of a process with the exit code ``code``, which is negative after a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    reason = " (often because the machine ran out of memory)" if name == "SIGKILL" else ""
    return f"was terminated by {name}{reason}"


def watch_parent(pid: int) -> None:
    """End this process when the process ``pid``, which started it, has ended."""
    if any(thread.name == "roomier-parent" for thread in threading.enumerate()):
        return

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(_POLL_S * 5)
        _exit(1)

    threading.Thread(target=watch, name="roomier-parent", daemon=True).start()


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
