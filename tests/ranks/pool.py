"""Runs a function of a test on several ranks at once: see :class:`RankPool`.

[Note: forked ranks]
Ranks are forked from one process that imported torch, roomier and the test's file and did nothing else
(``server.py``). A call costs some 50 ms and starts clean: no seed, environment, process group or cache of an earlier
one is left, and a rank may die without harm to the next call. Threads would make forking unsafe: the server has none.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

DEFAULT_TIMEOUT_S = 180.0
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0


class RankFailed(AssertionError):  # noqa: N818 - what happened, as pytest's Failed
    """A rank raised, died or did not end. The text holds the traceback of the rank that failed first.

    Attributes:
        rank: which.
        reports: what is known of each rank that failed, by rank.
    """

    def __init__(self, rank: int, reports: dict[int, str]) -> None:
        others = [each for each in sorted(reports) if each != rank]
        also = f"\nranks that failed after it: {others}" if others else ""
        super().__init__(f"rank {rank} failed first\n{reports[rank]}{also}")
        self.rank = rank
        self.reports = reports


class RankPool:
    """Calls functions on several ranks, which meet in a process group of gloo.

    The server starts with the first call. A call that fails leaves the pool as it was.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __call__(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        joins: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """``function(*args, **kwargs)`` on each rank.

        On each rank the environment is that of the caller and what torchrun would add (``RANK``, ``WORLD_SIZE``,
        ``LOCAL_RANK``, ``MASTER_PORT``, ...), and so is the current folder; all seeds are 0; warnings are errors.
        What ranks print is printed here, each line with its rank.

        Args:
            function: of the top level of a file. What it takes and returns is pickled.
            timeout_s: after it all ranks are killed, and the stack of each is told.
            joins: the default process group is there already.

        Returns:
            What the ranks returned, by rank.

        Raises:
            RankFailed: a rank raised, died or did not end in time.
        """
        if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
            raise TypeError(f"{function.__qualname__} is not a function of the top level of a file")
        request = {
            "num_ranks": num_ranks,
            "module": function.__module__,
            "file": str(Path(inspect.getfile(function)).resolve()),
            "function": function.__qualname__,
            "payload": pickle.dumps((args, kwargs)),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "path": sys.path,
            "timeout_s": timeout_s,
            "joins": joins,
        }
        try:
            reply = self._ask(request, timeout_s)
        except BaseException:
            self.close()  # an answer that comes later would be taken for that of the next call
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
        # The server keeps to the time limit; it may import the test's file before, and kill ranks after.
        end = time.monotonic() + timeout_s + _START_TIMEOUT_S
        if not self._connection.poll(end - time.monotonic()):
            raise TimeoutError("the server of the ranks does not answer")
        reply: dict[str, Any] = self._connection.recv()
        return reply

    def _start(self) -> None:
        self.close()
        self._connection, theirs = Pipe()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the tests; the server ends when they do
            )

    def close(self) -> None:
        """End the server and what it started. The next call starts a new one."""
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            try:
                self._server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
        self._server = self._connection = None
