"""The threads of the heartbeat, tested with ranks that are objects in one process, and with a store that can stop
answering."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from roomier.core.world import World
from roomier.launch import heartbeat
from roomier.launch.failure import FailureNews
from roomier.launch.heartbeat import Heartbeat, WatchedRun, end_of
from roomier.launch.judge import Limits
from roomier.launch.records import Activity, Late, Position, RankRecord

WAIT_S = 60.0  # on a busy machine; the bounds below are much shorter
END_S = 1.2


class Line:
    """Connection to ``store`` that blocks until ``answers`` is set."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.answers.wait()
            return getattr(self._store, name)(*arguments)

        return call


class Ranks:
    """Heartbeats of ``size`` ranks that wait at the same position, each on a separate machine."""

    def __init__(self, size: int, end_s: float) -> None:
        self.store, self.exit_codes = HashStore(), dict[int, int]()
        self.lines = [Line(self.store) for _ in range(size)]
        position = Position(Activity.STEP, "training step", 7, 3)
        run = WatchedRun(Limits(end_s), lambda: position, lambda: "  File of the stack")
        self.heartbeats = [self._start(World(rank, size, node_rank=rank), run) for rank in range(size)]

    def _start(self, world: World, run: WatchedRun) -> Heartbeat:
        def end(code: int) -> None:
            self.exit_codes.setdefault(world.rank, code)
            made._stop.set()

        made = Heartbeat(world, lambda: self.lines[world.rank], FailureNews(world), end)  # type: ignore[arg-type,return-value]
        made.watch(run)
        return made

    def has_left(self, rank: int) -> bool:
        message = json.loads(self.store.get(f"heartbeat/{rank}"))
        return bool((message["record"] if rank == 0 else message)["has_left"])

    def close(self) -> None:
        for line in self.lines:
            line.answers.set()
        for each in reversed(self.heartbeats):
            each.close()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setattr(heartbeat, "_process_of", lambda _: None)  # all ranks are this process, so none may be killed
    started: list[Ranks] = []

    def of(size: int, end_s: float = END_S) -> Ranks:
        started.append(Ranks(size, end_s))
        return started[-1]

    yield of
    for each in started:
        each.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_other_ranks_report_a_silent_rank_and_end(
    start: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = start(3)
    wait_until(lambda: ranks.store.check([f"heartbeat/{rank}" for rank in range(3)]))
    ranks.lines[2].answers.clear()  # the second thread of rank 2 still runs and judges rank 0
    wait_until(lambda: {0, 1} <= ranks.exit_codes.keys())
    assert ranks.exit_codes[0] == ranks.exit_codes[1] == 1
    printed = capsys.readouterr().err
    assert "heartbeat: rank 2 (process" in printed
    assert "has sent no heartbeat for" in printed
    for rank in (0, 1):
        assert f"roomier: heartbeat: rank {rank}: training step, step 7, batch 3\n  File of the stack\n" in printed
    assert "heartbeat: the run ends: hang_timeout=" in printed


def test_the_error_refers_only_to_printed_stacks() -> None:
    record = RankRecord(1, Position(Activity.STEP, "training step", 7, 3), host="node", pid=1234)
    silent, behind = Late(2, record, 90.0, 0.0, is_silent=True), Late(1, record, 90.0, 0.0)
    text = str(end_of([silent], 90.0))
    assert text.startswith("hang_timeout={'seconds': 90.0}: rank 2 (process 1234 on node) has sent no heartbeat for")
    assert "(position in its last heartbeat: training step, step 7, batch 3)" in text
    assert "See the reported stack" not in text
    assert "See the reported stack of rank 1. " in str(end_of([silent, behind], 90.0))


@pytest.mark.more
def test_the_other_ranks_judge_rank_0_if_the_store_does_not_answer(
    start: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = start(3)
    wait_until(lambda: all(each._zero is not None for each in ranks.heartbeats[1:]))
    for line in ranks.lines:
        line.answers.clear()
    wait_until(lambda: len(ranks.exit_codes) == 2)
    assert ranks.exit_codes == {1: 1, 2: 1}
    printed = capsys.readouterr().err
    assert "heartbeat: rank 0 (process" in printed
    for rank in (1, 2):
        assert f"roomier: heartbeat: rank {rank}: training step, step 7, batch 3\n" in printed
    assert "the run ends: hang_timeout=" in printed


def test_rank_0_leaves_after_the_ranks_that_use_its_store(start: Callable[..., Ranks]) -> None:
    ranks = start(2, end_s=12.0)
    zero, one = ranks.heartbeats
    wait_until(lambda: ranks.store.check(["heartbeat/1"]))
    zero.close()
    assert ranks.has_left(0)
    assert ranks.has_left(1)  # rank 1 has left after it read that rank 0 leaves
    assert not any(thread.is_alive() for thread in (*zero._threads, one._threads[0]))
