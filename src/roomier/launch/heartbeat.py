"""Heartbeat: threads in each rank that detect hanging ranks without using collectives.

At each tick, a rank publishes its record in the store of the rendezvous, over a separate connection. Rank 0 reads the
records of all ranks and publishes its own record with a verdict, which the others read. The store usually stops
together with rank 0, and calls to it then block, so the other ranks also have a second thread, which checks only rank
0.

The training thread does no work for the heartbeat, whose threads read its position from its stack and from the counters
of the run.

Each line of a message that contains the number of a rank begins with ``roomier: heartbeat:``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.units import format_seconds
from roomier.core.world import World
from roomier.launch.environment import STARTED_BY_ROOMIER
from roomier.launch.failure import FailureNews, report_to_torchrun
from roomier.launch.judge import TICK_S, Judge, Limits
from roomier.launch.records import Activity, Late, Position, RankRecord, Verdict

_OUTSIDE = Position(Activity.OUTSIDE, "outside of a run")
_MARGIN_S = 5.0  # additional time per tick, in which the other ranks can read a record of rank 0
_BEFORE_KILL_S = 1.5
_heartbeat: Heartbeat | None = None


@dataclass(frozen=True)
class WatchedRun:
    """Run that the heartbeat watches.

    Attributes:
        limits: time limits for late ranks.
        position: function that returns the position of the training thread.
        stack: function that returns the Python stack of the training thread.
    """

    limits: Limits
    position: Callable[[], Position]
    stack: Callable[[], str]


def prepare(world: World, connect: Callable[[], Store], news: FailureNews) -> None:
    """Create the heartbeat of this process. The threads of the heartbeat start with the first watched run."""
    global _heartbeat
    close()
    _heartbeat = Heartbeat(world, connect, news)


def close(*, waits: bool = True) -> None:
    """Stop the heartbeat of this process. Call this function before the process leaves the process group.

    Args:
        waits: if True, a process that serves the store waits for the last records of the other ranks.
    """
    global _heartbeat
    heartbeat, _heartbeat = _heartbeat, None
    if heartbeat is not None:
        heartbeat.close(waits=waits)


@contextmanager
def watched(run: WatchedRun) -> Iterator[None]:
    """Watch ``run`` inside the context. If roomier did not initialize the process group, no heartbeat runs."""
    heartbeat = _heartbeat
    if heartbeat is None:
        yield
        return
    before = heartbeat.run
    heartbeat.watch(run)
    try:
        yield
    finally:
        heartbeat.watch(before)


def _forget() -> None:  # a forked process does not have the threads of the heartbeat
    global _heartbeat
    _heartbeat = None


os.register_at_fork(after_in_child=_forget)


class Heartbeat:
    """Heartbeat of this process, which publishes the records of this rank and acts on verdicts.

    Args:
        world: rank of this process and the number of ranks.
        connect: function that opens a connection to the store. No other thread uses this connection.
        news: object through which the ranks exchange failures.
        end_process: function that terminates this process with an exit code.

    Attributes:
        run: the watched run; None outside of runs.
    """

    def __init__(
        self,
        world: World,
        connect: Callable[[], Store],
        news: FailureNews,
        end_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self.run: WatchedRun | None = None
        self._world, self._connect, self._news, self._end_process = world, connect, news, end_process
        process = psutil.Process()
        self._record = RankRecord(0, _OUTSIDE, {}, socket.gethostname(), process.pid, process.create_time())
        self._zero: RankRecord | None = None
        self._judge: Judge | None = None
        self._verdict: Verdict | None = None
        self._last_number = 0
        self._noted: set[tuple[int, str]] = set()
        self._stop, self._waits = threading.Event(), True
        self._threads: list[threading.Thread] = []

    def watch(self, run: WatchedRun | None) -> None:
        """Watch ``run`` with a new judge. If ``run`` is None, stop watching."""
        self._judge = None if run is None else Judge(run.limits, _process_state)
        self.run = run
        if run is not None and not self._threads:
            targets = [self._exchange] if self._world.rank == 0 else [self._exchange, self._judge_zero]
            self._threads = [threading.Thread(target=each, name="roomier-heartbeat", daemon=True) for each in targets]
            for thread in self._threads:
                thread.start()

    def close(self, *, waits: bool = True) -> None:
        """Stop the threads. If a thread is blocked in a call to the store, wait for it only for a limited time."""
        self._waits = waits
        self._stop.set()
        for thread in self._threads:
            thread.join(self._tick_s + _MARGIN_S)

    @property
    def _tick_s(self) -> float:
        run = self.run
        return TICK_S if run is None else run.limits.tick_s

    def _next_record(self) -> RankRecord:
        run, position = self.run, _OUTSIDE
        if run is not None:
            position = self._record.position
            with suppress(Exception):  # the training thread changes these values concurrently
                position = run.position()
        calls = self._record.calls
        with suppress(RuntimeError):  # some process groups have no sequence numbers
            calls = torch_private.num_calls_by_group()
        return replace(self._record, beat=self._record.beat + 1, position=position, calls=calls)

    # The store -----------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        exchange = self._exchange_as_zero if self._world.rank == 0 else self._exchange_with_zero
        with suppress(DistError, RuntimeError):  # the process that serves the store may have ended
            store = self._connect()
            try:
                while not self._stop.is_set() and not (self._zero and self._zero.has_left):
                    self._record = self._next_record()
                    exchange(store)
                    self._stop.wait(self._tick_s)
            finally:
                self._leave(store)  # also publish after an error, because a rank without records would appear to hang

    def _exchange_as_zero(self, store: Store) -> None:
        judge = self._judge
        others = self._records_of_others(store)
        if judge is not None and others:
            late = judge.look(time.monotonic(), {0: self._record, **others})
            self._verdict = self._next_verdict(late, judge.limits.end_s)
        self._publish_as_zero(store)
        if self._verdict is not None:
            self._act(self._verdict)

    def _exchange_with_zero(self, store: Store) -> None:
        store.set(_key(self._world.rank), self._record.to_json())
        if not store.check([_key(0)]):
            return
        message = json.loads(store.get(_key(0)))
        self._zero = RankRecord.of(message["record"])
        if message["verdict"] is not None:
            self._act(Verdict.of(message["verdict"]))

    def _records_of_others(self, store: Store) -> dict[int, RankRecord]:
        """Return the records of the other ranks; empty until all of these ranks have published a record."""
        ranks = range(1, self._world.size)
        keys = [_key(rank) for rank in ranks]
        if not store.check(keys):
            return {}
        return {rank: RankRecord.of(json.loads(text)) for rank, text in zip(ranks, store.multi_get(keys), strict=True)}

    def _publish_as_zero(self, store: Store) -> None:
        verdict = None if self._verdict is None else asdict(self._verdict)
        store.set(_key(0), json.dumps({"record": asdict(self._record), "verdict": verdict}))

    def _leave(self, store: Store) -> None:
        """Publish the last record of this rank. Then, if rank 0 serves the store, wait until no rank uses the store."""
        self._record = replace(self._record, has_left=True)
        if self._world.rank > 0:
            store.set(_key(self._world.rank), self._record.to_json())
            self._stop.set()
            return
        self._publish_as_zero(store)
        # If roomier or torchrun started all ranks from one process, the process that serves the store ends after all
        # ranks.
        is_parent = STARTED_BY_ROOMIER in os.environ and self._world.is_one_node
        if is_parent or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        until = time.monotonic() + self._tick_s + 1.0
        while self._waits and not self._news.has_error and time.monotonic() < until:
            if all(record.has_left for record in self._records_of_others(store).values()):
                return
            time.sleep(0.02)

    # Late ranks ----------------------------------------------------------------------------------------------------

    def _next_verdict(self, late: Sequence[Late], end_s: float) -> Verdict | None:
        """Return the verdict of rank 0: the last verdict if no additional rank became late; None if no late rank has a
        time limit."""
        for each in late:
            self._note(each)
        hung = [each for each in late if each.left_s is not None]
        before = self._verdict
        if not hung:
            if before is not None:
                say(f"{names_of(before.late)} makes progress again")
            return None
        ends = any(each.left_s is not None and each.left_s <= 0 for each in hung)
        if before is not None and before.ends == ends and _ranks(before.late) >= _ranks(hung):
            return before
        return Verdict(self._last_number + 1, ends, end_s, hung)

    def _judge_zero(self) -> None:
        """On a rank other than rank 0, check whether rank 0 is silent. The verdicts of this thread apply only to this
        rank."""
        run, judge, beat, is_reported = None, None, 0, False
        while not self._stop.wait(self._tick_s):
            if self.run is not run:
                run = self.run
                judge = None if run is None else Judge(run.limits, _process_state)
            zero, beat = self._zero, beat + 1
            if judge is None or run is None or zero is None:
                continue
            own = replace(self._next_record(), beat=beat)
            found = judge.look(time.monotonic(), {0: zero, self._world.rank: own})
            late = next((each for each in found if each.rank == 0 and each.is_silent), None)
            if late is None:
                is_reported = False
            elif late.left_s is None:
                if self._world.rank == 1:
                    self._note(late)
            elif late.left_s <= 0:
                self._end([late], run.limits.end_s, is_from_zero=False)
            elif not is_reported:
                is_reported = True
                say(report_of([late]))
                say(position_of(self._world.rank, own, run.stack()))

    def _note(self, late: Late) -> None:
        key = (late.rank, late.record.position.phase)
        if late.left_s is None and key not in self._noted:
            self._noted.add(key)
            say(note_of(late))

    def _act(self, verdict: Verdict) -> None:
        """Act on a new verdict of rank 0."""
        run = self.run
        if verdict.number == self._last_number:
            return
        self._last_number = verdict.number
        if verdict.ends:
            self._end(verdict.late, verdict.end_s, is_from_zero=True)
            return
        if self._world.local_rank == 0:
            say(report_of(verdict.late))
        say(position_of(self._world.rank, self._record, "" if run is None else run.stack()))

    def _end(self, late: Sequence[Late], end_s: float, *, is_from_zero: bool) -> None:
        """End this process, and kill the silent ranks of this machine, which cannot end themselves. Return if the run
        continues without the late ranks."""
        if all(each.is_silent for each in late) and self._news.continues():
            return
        error, rank = end_of(late, end_s), self._world.rank
        # The timer is required because output to a full pipe blocks.
        last = threading.Timer(2 * self._tick_s + 2 * _MARGIN_S, self._end_process, [1])
        last.daemon = True
        last.start()
        self._news.is_failing = True
        report_to_torchrun(error, None)
        if rank == 0:
            # This claim prevents other ranks from reporting a lost connection.
            self._news.claim(f"{type(error).__name__}: {error}")
        if self._world.local_rank == 0 or not is_from_zero:
            say(f"the run ends: {error}")
        # Rank 0 may serve the store, so it waits until the other ranks have read the verdict. torchrun reports only the
        # first failure, so all ranks wait before they kill silent ranks.
        time.sleep(max(_BEFORE_KILL_S, 2 * self._tick_s if rank == 0 else 0.0))
        for each in late:
            if each.is_silent and (process := _process_of(each.record)) is not None:
                with suppress(psutil.Error):
                    process.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        self._end_process(1)


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _ranks(late: Sequence[Late]) -> set[int]:
    return {each.rank for each in late}


def _process_of(record: RankRecord) -> psutil.Process | None:
    """Return the process that published ``record``; None if this process has ended, runs on a different machine, or
    runs a different command."""
    if record.host != socket.gethostname():
        return None
    try:
        process, own = psutil.Process(record.pid), psutil.Process()
        is_same = abs(process.create_time() - record.born) < 1.0 and process.cmdline()[1:] == own.cmdline()[1:]
        return process if is_same else None
    except psutil.Error:
        return None


def _process_state(record: RankRecord) -> str | None:
    process = _process_of(record)
    try:
        return None if process is None else str(process.status())
    except psutil.Error:
        return None


_NUM_SHOWN = 8


def say(message: str) -> None:
    """Print ``message`` on standard error in one write, because ranks share the terminal."""
    sys.stderr.write(f"roomier: heartbeat: {message}\n")
    sys.stderr.flush()


def names_of(late: Sequence[Late]) -> str:
    """Return the numbers of the late ranks as text."""
    names = ", ".join(str(each.rank) for each in late[:_NUM_SHOWN])
    return f"rank {names}" if len(late) <= _NUM_SHOWN else f"rank {names} and {len(late) - _NUM_SHOWN} more"


def note_of(late: Late) -> str:
    """Return the line for a late rank whose activity has no time limit."""
    silence = ", which sends no heartbeats" if late.is_silent else ""
    where = f"{late.record.position} (hang_timeout does not apply)"
    return f"other ranks have waited {_seconds(late)} for {_rank(late)}{silence}: {where}"


def report_of(late: Sequence[Late]) -> str:
    """Return the line that goes with the positions of all ranks."""
    left_s = min(each.left_s for each in late if each.left_s is not None)
    return (
        f"{problem_of(late)}. If this does not change, the run ends in {format_seconds(max(0.0, left_s))} "
        "(hang_timeout). Each rank prints its position and its Python stack"
    )


def position_of(rank: int, record: RankRecord, stack: str) -> str:
    """Return the position and the stack of one rank as text."""
    return f"rank {rank}: {record.position}\n{stack.rstrip()}"


def end_of(late: Sequence[Late], end_s: float) -> TrainingError:
    """Return the error that ends the run."""
    action = "Resume with ckpt_path='last'. If a rank can take this long, increase hang_timeout or set it to None"
    if reported := [each for each in late if not each.is_silent]:
        collective = "If the stack ends in a collective, the ranks ran different layers"
        action = f"See the reported stack of {names_of(reported)}. {collective}. {action}"
    return TrainingError("hang_timeout", {"seconds": round(end_s, 1)}, problem_of(late), action)


def problem_of(late: Sequence[Late]) -> str:
    """Describe each late rank."""
    shown = "; ".join(map(_problem, late[:_NUM_SHOWN]))
    return shown if len(late) <= _NUM_SHOWN else f"{shown}; and {len(late) - _NUM_SHOWN} more ranks"


def _problem(late: Late) -> str:
    if not late.is_silent:
        return (
            f"{_rank(late)} has made no progress for {_seconds(late)} while other ranks wait for it: "
            f"{late.record.position}"
        )
    return (
        f"{_rank(late)} has sent no heartbeat for {_seconds(late)} while other ranks wait for it (position in its "
        f"last heartbeat: {late.record.position}). {_silence(late)}, so this rank prints no stack"
    )


def _silence(late: Late) -> str:
    pid, host = late.record.pid, late.record.host
    if late.process_state == "stopped":
        return f"Its process is stopped (`kill -CONT {pid}` resumes it)"
    if late.process_state == "disk-sleep":
        return "Its process waits for storage or for a driver"
    return (
        f"Its process is stopped, or a native call holds the interpreter lock (`py-spy dump --pid {pid}` on {host} "
        "shows the call)"
    )


def _rank(late: Late) -> str:
    return f"rank {late.rank} (process {late.record.pid} on {late.record.host})"


def _seconds(late: Late) -> str:
    return format_seconds(late.waited_s)
