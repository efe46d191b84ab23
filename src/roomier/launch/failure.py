"""The end of a rank that fails: the rank with the error tells it first, the others end without adding noise.

When a rank dies, all others fail too, in whatever they were exchanging: tracebacks that say "connection closed by
peer", of no use and often printed last. So an error that only says that a peer is gone waits a moment, for the news of
another rank's failure or for the launcher that ends this one, and is printed only if neither comes.
"""

from __future__ import annotations

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

from roomier.core.world import World

PATIENCE_S = 3.0
_END_S = 5.0  # what ending may take, handlers at exit included
_EXIT_S = 10.0  # between the first and the last rank that exits with code 0 in the same step
_FIRST = "roomier/first_failure"
_ZERO_HAS_ENDED = "rank 0 has ended"
_GLOO_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo::")

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class FailureNews:
    """What the ranks of a run know of each other's failures.

    Args:
        ended_rank: returns a rank of this machine that has ended, and how, as far as this process started the ranks.

    Attributes:
        has_error: an uncaught exception ends this rank, perhaps because it lost another one.
        is_failing: this rank ends with an error of its own.
        has_lost_peer: this rank ends because it could not reach another one.
        where: returns the place in the run, for messages.
        store: seen by all ranks, once they have met; its own connection, for it is used while others may hang.
    """

    def __init__(self, world: World, ended_rank: Callable[[], tuple[int, str] | None] = lambda: None) -> None:
        self.world = world
        self.has_error = self.is_failing = False
        self.has_lost_peer = False
        self.where: Callable[[], str] = lambda: ""
        self.store: Store | None = None
        self._ended_rank = ended_rank
        self._num_exits = 0
        self._before: Hook = sys.excepthook

    def install(self) -> None:
        """Become what Python calls for an uncaught exception."""
        self._before, sys.excepthook = sys.excepthook, self._end

    def claim(self, text: str) -> bool:
        """Whether this rank is the first to fail, or the first with this ``text``: else it need not say it again."""
        self.is_failing = True
        first = f"{self.world.rank}\n{text}"
        if self.store is not None:
            with suppress(DistError, RuntimeError):  # rank 0 is gone, and what it kept with it
                first = self.store.compare_set(_FIRST, "", first).decode()
        rank, _, told = first.partition("\n")
        return int(rank) == self.world.rank or told != text

    def wait_for_peer(self) -> str | None:
        """What is known of another rank's end within ``PATIENCE_S``; None for nothing."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if (ended := self._ended_rank()) is not None:
                return "rank {} {}".format(*ended)
            try:
                if self.store is not None and self.store.check([_FIRST]):
                    rank = self.store.get(_FIRST).decode().partition("\n")[0]
                    return f"rank {rank} failed"
            except (DistError, RuntimeError):
                return _ZERO_HAS_ENDED
            time.sleep(0.05)
        return None

    def is_told(self, within_s: float) -> bool:
        """Whether a rank tells of its failure, now or ``within_s`` from now."""
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
        """Wait up to ``_EXIT_S`` for the other ranks to call this method as well.

        Returns:
            The ranks that did not.
        """
        self._num_exits += 1
        return self._absent(f"roomier/exits/{self._num_exits}", _EXIT_S)

    def end_unconnected(self, waited_s: float) -> None:
        """End this process, because the ranks have met and do not connect. The ranks that wait all call this method."""
        try:
            absent = self._absent("roomier/unconnected", PATIENCE_S)
        except (DistError, RuntimeError):
            absent = [0]
        ended = f"these ranks have ended or cannot be reached: {absent}"
        sys.stderr.write(f"roomier: the ranks have met, but did not connect within {waited_s:g} s; {ended}\n")
        sys.stderr.flush()
        if self.world.rank == 0:
            time.sleep(1.0)  # the others read the store
        os._exit(1)

    def _absent(self, prefix: str, within_s: float) -> list[int]:
        """Return the ranks that do not call this method as well ``within_s`` from now."""
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
        end_in_time()
        self.has_error = True
        if issubclass(kind, KeyboardInterrupt) and self.world.rank > 0:
            return
        if is_of_lost_peer(error):
            self.has_lost_peer = True
            known = self.wait_for_peer()
            if known == _ZERO_HAS_ENDED and self.world.rank == 1:
                sys.stderr.write(f"roomier: {known} {self.where()}".rstrip() + "\n")
            if known is not None:  # another process reports it
                return
            self.is_failing = True
            self._before(kind, error, trace)
            return
        tell_torchrun(error, trace)
        if not self.claim(f"{kind.__name__}: {error}"):
            return
        if self._before is sys.__excepthook__:  # in one write: ranks share the terminal
            sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
            sys.stderr.flush()
        else:
            self._before(kind, error, trace)


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether ``error``, or what it comes from, only says that a rank cannot be reached any more."""
    return any(
        isinstance(each, DistError)
        or (isinstance(each, RuntimeError) and any(sign in str(each) for sign in _GLOO_SIGNS))
        for each in _chain(error)
    )


def end_in_time() -> None:
    """End the process with status 1 in ``_END_S``, whatever still hangs then."""

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(_END_S, end)
    timer.daemon = True
    timer.start()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def tell_torchrun(error: BaseException, trace: TracebackType | None) -> None:
    """Write ``error`` into the error file of torchrun, whose summary names the rank and shows the error."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # it records the traceback of what is being handled
        except BaseException:
            with suppress(OSError):
                get_error_handler().record_exception(error)
            error.__traceback__ = trace
