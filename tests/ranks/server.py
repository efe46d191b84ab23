"""Server process from which ranks are forked. ``pool.py`` starts this script and contains [Note: forked ranks]."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import torch
import torch._dynamo  # imported here once, so that the ranks of each call do not import these modules lazily
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import roomier
import roomier.core.yaml_text
import roomier.launch.group
import roomier.techniques.parallel.replicate
import roomier.techniques.parallel.shard  # noqa: F401
from roomier.core.loopback import keep_on_loopback

GROUP_TIMEOUT_S = 120.0
MAX_REPORT_CHARS = 20_000  # the output of a process that aborts ends with its stacks and all its libraries
GRACE_S = 3.0  # time in which the other ranks can end after a failure
# Errors of a rank that lost the connection to another rank. Such an error is never the first cause.
_SIGNS_OF_A_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket Timeout")


@dataclass
class Rank:
    """State of a rank in the server."""

    pid: int
    connection: Connection
    printed: IO[bytes]
    result: bytes | None = None
    report: str | None = None
    failed_at: float | None = None

    @property
    def is_done(self) -> bool:
        return self.result is not None or self.report is not None

    def fail(self, at: float, report: str) -> None:
        self.failed_at, self.report = at, report

    def output(self) -> str:
        self.printed.seek(0)
        return self.printed.read().decode(errors="replace")


def main(requests: Connection) -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # otherwise a collection in a rank would copy the memory that is shared with the server
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        requests.send(handle(request, requests))


def handle(request: dict[str, Any], requests: Connection) -> dict[str, Any]:
    sys.path[:] = request["path"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if request["setup"] is not None:
                set_up(request["setup"])
            for each in (request["prepare"], request["function"]):
                if each is not None:
                    find(each)
    except Exception:
        _, file, _ = request["function"]
        report = f"could not import {file}\n{traceback.format_exc()}"
        return {"results": [], "reports": {0: report}, "first": 0, "printed": []}
    meeting = Path(tempfile.mkdtemp(prefix="ranks-"))
    try:
        request = {**request, "port": free_port(), "store": str(meeting / "store")}
        ranks = [start(rank, request, requests) for rank in range(request["num_ranks"])]
        try:
            wait_for_ranks(ranks, time.monotonic() + request["timeout_s"], requests)
        finally:
            for rank in ranks:
                end(rank)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    return summary(ranks)


@functools.cache
def set_up(reference: tuple[str, str, str]) -> None:
    """Call the function at the first request. Ranks that are forked later inherit its effects."""
    find(reference)()
    gc.collect()
    gc.freeze()


def find(reference: tuple[str, str, str]) -> Any:
    """Return the function that ``pool.reference`` describes."""
    module, file, name = reference
    found = load(module, file)
    for each in name.split("."):
        found = getattr(found, each)
    return found


def load(name: str, file: str) -> Any:
    """Return the module ``name``. The first call imports ``file`` under the name that it has in the test process."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def start(rank: int, request: dict[str, Any], requests: Connection) -> Rank:
    of_server, of_rank = Pipe()
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the call ends
    pid = os.fork()
    if pid == 0:
        of_server.close()
        requests.close()
        run_rank(rank, request, of_rank, printed)
    of_rank.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)  # the rank makes the same call, and either call can come first
    return Rank(pid, of_server, printed)


def wait_for_ranks(ranks: list[Rank], end_at: float, requests: Connection) -> None:
    """Wait until every rank is done, or until ``GRACE_S`` after the first failure."""
    while waiting := [rank for rank in ranks if not rank.is_done]:
        now = time.monotonic()
        if any(rank.failed_at is not None for rank in ranks):
            end_at = min(end_at, min(rank.failed_at for rank in ranks if rank.failed_at is not None) + GRACE_S)
        if now >= end_at:
            give_up(waiting, has_failure=any(rank.report is not None for rank in ranks))
            return
        ready = wait([*(rank.connection for rank in waiting), requests], end_at - now)
        if requests in ready:  # the pool sends one request at a time, so it has closed the connection
            return
        for rank in waiting:
            if rank.connection in ready:
                receive(rank)


def receive(rank: Rank) -> None:
    try:
        kind, at, content = rank.connection.recv()
    except (EOFError, OSError):
        output = rank.output()[-MAX_REPORT_CHARS:]
        rank.fail(time.monotonic(), f"it {how_it_ended(rank.pid)} without an error\n{output}")
        return
    if kind == "result":
        rank.result = content
    else:
        rank.fail(at, content)


def how_it_ended(pid: int) -> str:
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit status {os.waitstatus_to_exitcode(status)}"


def give_up(waiting: list[Rank], *, has_failure: bool) -> None:
    """Report the stacks of the ranks that are still running."""
    for rank in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(0.3)
    reason = "was killed, because another rank failed" if has_failure else "did not end in time"
    for rank in waiting:
        rank.fail(time.monotonic(), f"it {reason}; its stack:\n{rank.output()[-MAX_REPORT_CHARS:]}")


def end(rank: Rank) -> None:
    with contextlib.suppress(OSError):
        rank.connection.send("leave")  # a rank whose call has ended waits for this message
    rank.connection.close()
    if rank.result is not None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(rank.pid, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)  # includes the processes that the rank started
    with contextlib.suppress(ChildProcessError):
        os.waitpid(rank.pid, 0)


def summary(ranks: list[Rank]) -> dict[str, Any]:
    failed = {index: rank for index, rank in enumerate(ranks) if rank.report is not None}

    def order(index: int) -> tuple[bool, float]:
        rank = failed[index]
        assert rank.report is not None
        assert rank.failed_at is not None
        return any(sign in rank.report for sign in _SIGNS_OF_A_LOST_PEER), rank.failed_at

    printed = [rank.output() for rank in ranks]
    for rank in ranks:
        rank.printed.close()
    return {
        "results": [rank.result for rank in ranks],
        "reports": {index: rank.report for index, rank in failed.items()},
        "first": min(failed, key=order) if failed else None,
        "printed": printed,
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# In the rank ----------------------------------------------------------------------------------------------------


def run_rank(rank: int, request: dict[str, Any], connection: Connection, printed: IO[bytes]) -> NoReturn:
    """Run the function in the forked process, and end the process."""
    try:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, sys.stderr)
        try:
            result = pickle.dumps(call(rank, request))
            message = ("result", time.monotonic(), result)
        except BaseException:
            message = ("error", time.monotonic(), traceback.format_exc())
        sys.stdout.flush()
        connection.send(message)
        if message[0] == "result":
            # Other ranks can still communicate with this rank. If they hang, the end of this rank makes them fail.
            connection.poll(GRACE_S)
    finally:
        os._exit(0)


def call(rank: int, request: dict[str, Any]) -> list[Any]:
    """Return the result of each call."""
    num_ranks = request["num_ranks"]
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
        OMP_NUM_THREADS="1",
    )
    # torch replaces its pool of threads at the first use after a fork. The threads of a backward pass, one for each
    # device, would do this at the same time, and one of the threads could find no pool and abort.
    torch.set_num_threads(1)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    if request["prepare"] is not None:
        find(request["prepare"])(**request["settings"])
    if request["joins"]:
        keep_on_loopback(os.environ)
        timeout_s = min(GROUP_TIMEOUT_S, request["timeout_s"])
        dist.init_process_group(
            request["backend"],
            init_method=f"file://{request['store']}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
    function = find(request["function"])
    calls = pickle.loads(request["payload"])
    results = []
    for index, (args, kwargs) in enumerate(calls):
        if index and request["prepare"] is not None:
            find(request["prepare"])(**request["settings"])
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            results.append(function(*args, **kwargs))
        except Exception as error:
            if len(calls) > 1:
                error.add_note(f"arguments of the call: {args}")
            raise
    return results


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
