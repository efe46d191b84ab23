"""Exit of all ranks after a failure. The failed rank reports its error first, and the other ranks exit without further
output.

If one rank exits, all others fail in their current collective. Their tracebacks ("connection closed by peer") do not
show the cause and are often printed last. If the error of a rank only reports a lost peer, the rank therefore waits for
up to ``PATIENCE_S`` seconds, and prints the error only if no other rank reports a failure and the launcher does not end
this rank.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from roomier.core.log import notice
from roomier.core.world import World

PATIENCE_S = 3.0
_END_S = 5.0  # Maximum time between an uncaught exception and the end of the process, including exit handlers.
_EXIT_S = 10.0  # Maximum time between the first and the last exit of a rank with code 0 in the same step.
_FIRST = "roomier/first_failure"
_ZERO_HAS_ENDED = "rank 0 has ended"
_POLL_S = 0.2
_OWN_SIGNS = (os.strerror(errno.EMFILE), os.strerror(errno.ENOMEM))  # gloo reports these errors with its file names
_GLOO_SIGNS = (
    "gloo/transport",
    "gloo::",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",  # by close_connections
)

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class FailureNews:
    """Exchange of failures between the ranks of a run.

    Args:
        ended_rank: function that returns the number of a started rank that has ended, and a description of its end. It
            returns None if this process started no rank that has ended.

    Attributes:
        has_error: True if an uncaught exception terminates this rank. The cause of the exception can be a lost peer.
        is_failing: True if this rank terminates because of an error in this rank.
        has_lost_peer: True if this rank terminates because it could not reach another rank.
        where: function that returns the current position in the run, for messages.
        describe: function that returns the name of a rank, for messages.
        continues: function that lets the run continue without ranks that send no heartbeats; it returns False if the
            run cannot continue.
        store: connection to the store that all ranks share; None before the rendezvous. Other threads use separate
            connections, because this connection must work even if another thread hangs.
    """

    def __init__(self, world: World, ended_rank: Callable[[], tuple[int, str] | None] = lambda: None) -> None:
        self.world = world
        self.has_error = self.is_failing = False
        self.has_lost_peer = False
        self.where: Callable[[], str] = lambda: ""
        self.describe: Callable[[int], str] = "rank {}".format
        self.continues: Callable[[], bool] = lambda: False
        self.store: Store | None = None
        self._ended_rank = ended_rank
        self._num_exits = 0
        self._is_ending = threading.Event()
        self._before: Hook = sys.excepthook

    def install(self) -> None:
        """Install the handler for uncaught exceptions."""
        self._before, sys.excepthook = sys.excepthook, self._end
        # The thread starts before a failure, because Thread.start() hangs in a process that has no memory left.
        threading.Thread(target=_end_in_time, args=(self._is_ending,), name="roomier-end", daemon=True).start()

    def claim(self, text: str) -> bool:
        """Return whether this rank must report ``text``: True unless another rank failed first with the same text."""
        self.is_failing = True
        first = f"{self.world.rank}\n{text}"
        if self.store is not None:
            with suppress(DistError, RuntimeError):  # rank 0 and its store may have ended
                first = self.store.compare_set(_FIRST, "", first).decode()
        rank, _, reported = first.partition("\n")
        return int(rank) == self.world.rank or reported != text

    def wait_for_peer(self) -> str | None:
        """Wait up to ``PATIENCE_S`` seconds for the failure of another rank, and describe this failure. Return None if
        no other rank failed."""
        until = time.monotonic() + PATIENCE_S
        while (known := self._failed_peer()) is None and time.monotonic() < until:
            time.sleep(0.05)
        return known

    def _failed_peer(self) -> str | None:
        if (ended := self._ended_rank()) is not None:
            return "rank {} {}".format(*ended)
        try:
            if self.store is not None and self.store.check([_FIRST]):
                rank = self.store.get(_FIRST).decode().partition("\n")[0]
                return f"rank {rank} failed"
        except (DistError, RuntimeError):
            return _ZERO_HAS_ENDED
        return None

    def is_reported(self, within_s: float) -> bool:
        """Return whether a rank reports its failure within the next ``within_s`` seconds."""
        until = time.monotonic() + within_s
        while self.store is not None:
            with suppress(DistError, RuntimeError):
                if self.store.check([_FIRST]):
                    return True
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
        return False

    def wait_for_exits(self) -> list[int]:
        """Wait until the other ranks also call this method, but at most ``_EXIT_S`` seconds.

        Returns:
            The ranks that did not call this method.
        """
        self._num_exits += 1
        return self._absent(f"roomier/exits/{self._num_exits}", _EXIT_S)

    def watch_connecting(self, is_connected: threading.Event, timeout_s: float) -> None:
        """Wait until ``is_connected`` is set. End this process if another rank fails or after ``timeout_s`` seconds,
        because torch would wait for the process group in both cases."""
        until = time.monotonic() + timeout_s
        while not is_connected.wait(_POLL_S):
            if time.monotonic() > until:
                self._end_unconnected(timeout_s)
            # The process that started a failed rank ends all ranks earlier, and reports this rank.
            if (known := self._failed_peer()) is not None and not is_connected.wait(_END_S + 1.0):
                notice(f"{known} before the process group was created, so the run ends", every_rank=True)
                os._exit(1)

    def _end_unconnected(self, waited_s: float) -> None:
        try:
            absent = self._absent("roomier/unconnected", PATIENCE_S)
        except (DistError, RuntimeError):
            absent = [0]
        problem = f"the process group was not created within {waited_s:g} s after the rendezvous"
        notice(f"{problem}; these ranks have ended or cannot be reached: {absent}", every_rank=True)
        if self.world.rank == 0:
            time.sleep(1.0)  # time in which the other ranks read the store
        os._exit(1)

    def _absent(self, prefix: str, within_s: float) -> list[int]:
        """Return the ranks that do not call this method with the same ``prefix`` within the next ``within_s``
        seconds."""
        if self.store is None:
            return []
        keys = {rank: f"{prefix}/{rank}" for rank in range(self.world.size)}
        self.store.set(keys[self.world.rank], "")
        until = time.monotonic() + within_s
        while absent := [rank for rank, key in keys.items() if not self.store.check([key])]:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        return absent

    def _end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._is_ending.set()
        self.has_error = True
        if issubclass(kind, KeyboardInterrupt) and self.world.rank > 0:
            return
        if is_of_lost_peer(error):
            self.has_lost_peer = True
            known = self.wait_for_peer()
            if known == _ZERO_HAS_ENDED and self.world.rank == 1:
                notice(f"{known} {self.where()}".rstrip(), every_rank=True)
            if known is not None:  # another process reports the error
                return
            self.claim(f"{kind.__name__}: {error}")
            self._before(kind, error, trace)
            return
        report_to_torchrun(error, trace)
        if not self.claim(f"{kind.__name__}: {error}"):
            return
        if self._before is sys.__excepthook__:  # a single write, because ranks share the terminal
            print("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr, flush=True)
        else:
            self._before(kind, error, trace)


def is_of_lost_peer(error: BaseException) -> bool:
    """Return whether ``error``, or an error in its chain, only reports that a rank is unreachable."""
    errors = list(chain(error))
    if any(sign in str(each) for each in errors for sign in _OWN_SIGNS):
        return False
    return any(
        isinstance(each, DistError)
        or (isinstance(each, RuntimeError) and any(sign in str(each) for sign in _GLOO_SIGNS))
        for each in errors
    )


def _end_in_time(is_ending: threading.Event) -> None:
    """End the process with exit code 1 ``_END_S`` seconds after ``is_ending`` is set, even if other threads or exit
    handlers hang."""
    is_ending.wait()
    try:
        time.sleep(_END_S)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Return ``error`` and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def report_to_torchrun(error: BaseException, trace: TracebackType | None) -> None:
    """Write ``error`` to torchrun's error file, so that torchrun's summary names the rank and the error."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # the handler of torchrun records the traceback of the current exception
        except BaseException:
            with suppress(OSError):
                get_error_handler().record_exception(error)
            error.__traceback__ = trace
