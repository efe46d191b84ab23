"""The judge of late ranks, with scripted records and a scripted clock: which ranks are late, and when."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import pytest

from roomier.launch.judge import Judge, Limits
from roomier.launch.records import Activity, Late, Position, RankRecord, Verdict

LIMITS = Limits(600.0)
TICK_S = LIMITS.tick_s
HANG_S = 100.0  # time at which a scripted rank hangs
STEP_S = 2.0
Script = Callable[[float], RankRecord | None]


def at_step(step: int, beat: float, *, calls: int | None = None, activity: Activity = Activity.STEP) -> RankRecord:
    position = Position(activity, f"some {activity}", step, step)
    return RankRecord(int(beat), position, {"world": step if calls is None else calls}, "node", 1)


def moves(t: float) -> RankRecord:
    """A rank that takes a step every ``STEP_S``."""
    return at_step(int(t / STEP_S), t)


def waits(t: float) -> RankRecord:
    """A rank that waits for another rank in the first collective after ``HANG_S``."""
    step = int(min(t, HANG_S) / STEP_S)
    return at_step(step, t, calls=step + (t >= HANG_S))


def hangs(activity: Activity = Activity.STEP) -> Script:
    """A rank whose training thread hangs at ``HANG_S``, in ``activity``."""

    def script(t: float) -> RankRecord:
        return at_step(int(min(t, HANG_S) / STEP_S), t, activity=activity if t >= HANG_S else Activity.STEP)

    return script


def is_silent(script: Script) -> Script:
    """The same rank, but without a record after ``HANG_S``."""
    return lambda t: script(min(t, HANG_S))


@dataclass
class Found:
    """First time at which each rank was noted, was reported, and caused the end of the run."""

    noted: dict[int, float]
    reported: dict[int, float]
    ended: dict[int, float]


def play(
    scripts: Mapping[int, Script],
    until_s: float = 1000.0,
    *,
    clock: Callable[[float], float] = lambda t: t,
    state: str | None = None,
    judge: Judge | None = None,
) -> Found:
    """Pass the records to a judge every ``TICK_S``. ``clock`` converts the true time to the time of the judge."""
    judge = judge or Judge(LIMITS, lambda _: state)
    found = Found({}, {}, {})
    for tick in range(int(until_s / TICK_S)):
        t = tick * TICK_S
        records = {rank: record for rank, script in scripts.items() if (record := script(t)) is not None}
        for late in judge.look(clock(t), records):
            if late.left_s is None:
                found.noted.setdefault(late.rank, t)
                continue
            found.reported.setdefault(late.rank, t)
            if late.left_s <= 0:
                found.ended.setdefault(late.rank, t)
    return found


def leaves_at(t_end: float) -> Script:
    return lambda t: replace(moves(t), has_left=t >= t_end)


def in_shards(shard: str, replica: str, ahead: tuple[int, int]) -> Script:
    """A rank in two groups. In each group, the rank has begun ``ahead`` more operations than the rank that hangs."""

    def script(t: float) -> RankRecord:
        step = int(min(t, HANG_S) / STEP_S)
        extra = ahead if t >= HANG_S else (0, 0)
        return replace(at_step(step, t), calls={shard: step + extra[0], replica: step + extra[1]})

    return script


def rises(t: float) -> float:
    return t


HUNG: dict[str, tuple[dict[int, Script], str | None, list[int]]] = {
    "stopped": ({0: waits, 1: is_silent(hangs())}, None, [1]),
    "stopped within a validation": ({0: waits, 1: is_silent(hangs(Activity.LONG))}, "stopped", [1]),
    "rank 0 is stopped, and another rank judges": ({0: is_silent(hangs()), 3: waits}, None, [0]),
    "deadlock": ({0: waits, 1: hangs()}, None, [1]),
    "deadlock on rank 0": ({0: hangs(), 1: waits, 2: waits}, None, [0]),
    "two of four": ({0: waits, 1: hangs(), 2: is_silent(hangs()), 3: waits}, None, [1, 2]),
    # Rank 1 hangs. Rank 0 waits for rank 1 in their shard, rank 3 waits for rank 1 in their replicas, and rank 2 waits
    # for rank 0.
    "deadlock in one of two groups": (
        {
            0: in_shards("shards of 0, 1", "replicas of 0, 2", (1, 0)),
            1: in_shards("shards of 0, 1", "replicas of 1, 3", (0, 0)),
            2: in_shards("shards of 2, 3", "replicas of 0, 2", (1, 1)),
            3: in_shards("shards of 2, 3", "replicas of 1, 3", (1, 1)),
        },
        None,
        [1],
    ),
    "many ranks": ({**dict.fromkeys(range(64), waits), 40: hangs()}, None, [40]),
}


@pytest.mark.parametrize("name", HUNG)
def test_a_rank_that_hangs_is_reported_after_a_minute_and_ends_the_run(name: str) -> None:
    scripts, state, expected = HUNG[name]
    found = play(scripts, state=state, until_s=800.0)
    assert sorted(found.reported) == sorted(found.ended) == expected
    assert found.noted == {}
    for rank in expected:
        assert HANG_S + 60.0 < found.reported[rank] <= HANG_S + 60.0 + STEP_S + 3 * TICK_S
        assert HANG_S + 600.0 < found.ended[rank] <= HANG_S + 600.0 + STEP_S + 3 * TICK_S


NOTED: dict[str, dict[int, Script]] = {
    "long validation, compilation, checkpoint or hook": {0: hangs(Activity.LONG), 1: waits, 2: waits},
    "the same without heartbeats": {0: waits, 1: is_silent(hangs(Activity.LONG))},
    "outside of a run": {0: waits, 1: hangs(Activity.OUTSIDE)},
}


@pytest.mark.parametrize("name", NOTED)
def test_an_activity_without_a_limit_is_noted_and_never_ends_the_run(name: str) -> None:
    found = play(NOTED[name], until_s=4000.0)
    assert len(found.noted) == 1
    assert found.reported == found.ended == {}


def all_slow(t: float) -> RankRecord:
    """A rank whose step at ``HANG_S`` takes 800 s, as on all other ranks."""
    return moves(t if t < HANG_S else max(HANG_S, t - 800.0))


SILENT: dict[str, tuple[dict[int, Script], str | None, Callable[[float], float]]] = {
    "all ranks make progress": ({0: moves, 1: moves}, None, rises),
    "a step that is slow on all ranks": ({0: all_slow, 1: all_slow, 2: all_slow}, None, rises),
    "debugger of Python": ({0: waits, 1: hangs(Activity.DEBUGGED)}, None, rises),
    "native debugger": ({0: waits, 1: is_silent(hangs())}, "tracing-stop", rises),
    "suspended, with a clock that continues": ({0: moves, 1: moves}, None, lambda t: t + 7200.0 * (t > 200.0)),
    "stopped and continued together, often": ({0: moves, 1: moves}, None, lambda t: t * 100.0),
    "a rank whose process ended": ({0: waits, 1: leaves_at(HANG_S)}, None, rises),
    "a rank whose process ended outside of a run": ({0: waits, 1: is_silent(hangs(Activity.OUTSIDE))}, None, rises),
    "a silent rank that no rank waits for": ({0: moves, 1: is_silent(hangs())}, None, rises),
    "a single rank": ({0: hangs()}, None, rises),
}


@pytest.mark.parametrize("name", SILENT)
def test_no_rank_is_late(name: str) -> None:
    scripts, state, clock = SILENT[name]
    assert play(scripts, until_s=2000.0, clock=clock, state=state) == Found({}, {}, {})


def test_the_slowest_step_is_added_to_the_bound() -> None:
    def slow(script: Script) -> Script:  # steps of 80 s
        return lambda t: script(t / 40.0)

    end_s = HANG_S * 40.0
    found = play({0: slow(waits), 1: slow(hangs())}, until_s=end_s + 400.0)
    assert list(found.reported) == [1]
    assert end_s + 60.0 + 80.0 < found.reported[1] <= end_s + 60.0 + 80.0 + 3 * TICK_S


def test_a_step_with_a_validation_is_not_the_slowest_step() -> None:
    def validates(t: float) -> RankRecord:  # validates for 500 s in the step at 50 s
        if t < 50.0 or t >= 550.0:
            return moves(t if t < 50.0 else t - 500.0)
        return replace(moves(50.0), beat=int(t), position=Position(Activity.LONG, "validation", 25, 25))

    judge = Judge(LIMITS)
    play({0: validates, 1: validates}, until_s=700.0, judge=judge)
    assert judge.slowest_s < 20.0


def test_a_rank_that_makes_progress_again_is_not_late() -> None:
    judge = Judge(LIMITS)
    scripts = {0: waits, 1: hangs()}
    play(scripts, until_s=200.0, judge=judge)
    assert [late.rank for late in judge.look(200.0, {rank: each(200.0) for rank, each in scripts.items()})] == [1]
    assert judge.look(205.0, {0: at_step(51, 205.0), 1: at_step(51, 205.0)}) == []


def test_small_bounds_keep_their_order() -> None:
    for end_s in (1.0, 60.0, 600.0, 1800.0):
        limits = Limits(end_s)
        assert 0 < 3 * limits.tick_s < limits.report_s < limits.end_s
    assert (LIMITS.report_s, LIMITS.tick_s) == (60.0, 5.0)


def test_records_and_verdicts_are_restored_from_json() -> None:
    record = replace(at_step(3, 7.0, activity=Activity.LONG), born=1.5, pid=42)
    assert RankRecord.of(json.loads(record.to_json())) == record
    verdict = Verdict(2, True, 600.0, [Late(1, record, 61.5, -1.0, is_silent=True, process_state="stopped")])
    assert Verdict.of(json.loads(json.dumps(asdict(verdict)))) == verdict
