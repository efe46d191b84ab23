"""Run a function of a test on several ranks. See :class:`RankPool`.

[Note: forked ranks]
Ranks are forked from a server process that has only imported torch, roomier and the file of the test (``server.py``). A
call takes about 50 ms. A call inherits no seed, environment, process group or cache from earlier calls, and a rank that
dies does not affect later calls. The server has no threads, because threads would make forking unsafe.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

DEFAULT_TIMEOUT_S = 180.0
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0


def reference(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the module, the file and the name with which the server finds a function at the top level of a file."""
    if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
        raise TypeError(f"{function.__qualname__} is not a function of the top level of a file")
    return function.__module__, str(Path(inspect.getfile(function)).resolve()), function.__qualname__


class RankFailed(AssertionError):  # noqa: N818 - named like pytest's Failed
    """A rank raised an error, died or did not end. The text contains the traceback of the rank that failed first.

    Attributes:
        rank: the rank that failed first.
        reports: report of each rank that failed.
    """

    def __init__(self, rank: int, reports: dict[int, str]) -> None:
        others = [each for each in sorted(reports) if each != rank]
        also = f"\nranks that failed after it: {others}" if others else ""
        super().__init__(f"rank {rank} failed first\n{reports[rank]}{also}")
        self.rank = rank
        self.reports = reports


class RankPool:
    """Callable that runs functions on several ranks, which are connected by a gloo process group.

    The server starts with the first call. The pool remains usable after a call that fails.

    Args:
        setup: function without arguments that the server calls once, before it forks ranks.
        prepare: function that each rank calls before it initializes the process group. Its arguments are the
            ``settings`` of the call.
        backend: backend of the default process group.
    """

    def __init__(
        self,
        *,
        setup: Callable[[], None] | None = None,
        prepare: Callable[..., None] | None = None,
        backend: str = "gloo",
    ) -> None:
        self._setup = None if setup is None else reference(setup)
        self._prepare = None if prepare is None else reference(prepare)
        self._backend = backend
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __call__(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        joins: bool = True,
        settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on each rank.

        Each rank has the current folder and the environment of the caller, with the variables of torchrun (``RANK``,
        ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_PORT``, ...). All seeds are 0, and warnings are errors. The output of
        the ranks is printed here. Each line starts with its rank.

        Args:
            function: function at the top level of a file. Arguments and results are pickled.
            timeout_s: time after which all ranks are killed and the stack of each rank is reported.
            joins: True to initialize the default process group before the call.
            settings: arguments of ``prepare``.

        Returns:
            The results of the ranks, by rank.

        Raises:
            RankFailed: a rank raised an error, died or did not end in time.
        """
        by_rank = self._results(num_ranks, function, [(args, kwargs)], timeout_s, joins, settings)
        return [results[0] for results in by_rank]

    def each(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        joins: bool = True,
        settings: dict[str, Any] | None = None,
    ) -> list[list[Any]]:
        """Call ``function(*args)`` for each ``args`` in ``calls``, one after the other in the same processes.

        This is faster than separate calls, because only the first call fills the caches of torch. All seeds are 0
        before each call.

        Returns:
            The results of the ranks, ordered by call and then by rank.
        """
        by_rank = self._results(num_ranks, function, [(args, {}) for args in calls], timeout_s, joins, settings)
        return [list(results) for results in zip(*by_rank, strict=True)]

    def _results(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        calls: Sequence[Any],
        timeout_s: float,
        joins: bool,
        settings: dict[str, Any] | None,
    ) -> list[list[Any]]:
        """Return the results, ordered by rank and then by call."""
        request = {
            "num_ranks": num_ranks,
            "function": reference(function),
            "setup": self._setup,
            "prepare": self._prepare,
            "settings": settings or {},
            "backend": self._backend,
            "payload": pickle.dumps(calls),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "path": sys.path,
            "timeout_s": timeout_s,
            "joins": joins,
        }
        try:
            reply = self._ask(request, timeout_s)
        except BaseException:
            self.close()  # otherwise, a late answer would be read as the answer to the next call
            raise
        for rank, text in enumerate(reply["printed"]):
            for line in text.splitlines():
                print(f"[rank {rank}] {line}")
        if reply["reports"]:
            raise RankFailed(reply["first"], reply["reports"])
        return [pickle.loads(result) for result in reply["results"]]

    def _ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._server is None or self._server.poll() is not None:
            self._start()
        assert self._connection is not None
        self._connection.send(request)
        # The server applies the time limit. Additional time is allowed, because the server imports the file of the test
        # before the call and kills ranks after the call.
        end = time.monotonic() + timeout_s + _START_TIMEOUT_S
        if not self._connection.poll(end - time.monotonic()):
            raise TimeoutError("the server of the ranks does not answer")
        reply: dict[str, Any] = self._connection.recv()
        return reply

    def _start(self) -> None:
        self.close()
        self._connection, of_server = Pipe()
        with of_server:
            self._server = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py")), str(of_server.fileno())],
                pass_fds=[of_server.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C interrupts only the tests; the server ends after them
            )

    def close(self) -> None:
        """End the server and its processes. The next call starts a new server."""
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            try:
                self._server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._server = self._connection = None
