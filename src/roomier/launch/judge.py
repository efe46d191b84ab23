"""Detection of hanging ranks from their records, without access to a clock or to the store.

[Note: late ranks]
A rank is late if it makes no progress while another rank waits for it. There are two cases:

- The rank is silent: it publishes no new records, because its process is suspended or a native call holds the
  interpreter lock.
- The rank is behind: in at least one process group, another rank has begun more operations, and in no process group has
  another rank begun fewer. The training thread of this rank must hang outside of a collective, because a rank that
  waits in a collective has already begun it.

The waiting time for a late rank starts when another rank begins to wait for it, so a step that is slow on all ranks
makes no rank late. The duration of the slowest micro-batch so far is added to each time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from roomier.launch.records import Activity, Late, RankRecord

REPORT_S = 60.0
TICK_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, to which the duration of the slowest micro-batch is added.

    Attributes:
        end_s: time after which the run ends.
    """

    end_s: float

    @property
    def report_s(self) -> float:
        """Time after which all ranks print their positions."""
        return min(REPORT_S, self.end_s / 2)

    @property
    def tick_s(self) -> float:
        """Time between two records of a rank."""
        return min(TICK_S, self.report_s / 6)


@dataclass
class _Seen:
    """Last record of a rank and the times at which parts of it changed."""

    record: RankRecord
    beat_s: float
    place_s: float
    step_s: float
    behind_s: float | None = None


class Judge:
    """Judge that finds the late ranks in successive records of all ranks. See [Note: late ranks].

    Args:
        limits: time limits for late ranks.
        process_state: function that returns the state of a silent rank's process, or None if the state is unknown.

    Attributes:
        slowest_s: duration of the slowest micro-batch so far, including any optimizer step after it. A micro-batch is
            not measured if a rank had an activity other than ``STEP`` in the meantime.
    """

    def __init__(self, limits: Limits, process_state: Callable[[RankRecord], str | None] = lambda _: None) -> None:
        self.limits = limits
        self.slowest_s = 0.0
        self._process_state = process_state
        self._seen: dict[int, _Seen] = {}
        self._clock_s = 0.0
        self._last_look_s: float | None = None
        self._unmeasured_s = 0.0

    def look(self, now_s: float, records: Mapping[int, RankRecord]) -> list[Late]:
        """Return the ranks that are late now.

        Args:
            now_s: time of a monotonic clock. If more than two ticks have passed since the last call, only two ticks are
                counted. In this case, this process was suspended, and other processes may also have been suspended.
            records: last record of each rank, keyed by rank.
        """
        if self._last_look_s is not None:
            self._clock_s += min(now_s - self._last_look_s, 2 * self.limits.tick_s)
        self._last_look_s = now_s
        records = {rank: record for rank, record in records.items() if not record.has_left}
        self._seen = {rank: self._updated(self._seen.get(rank), record) for rank, record in records.items()}
        if any(record.position.activity is not Activity.STEP for record in records.values()):
            self._unmeasured_s = self._clock_s
        _find_behind(self._seen.values(), self._clock_s)
        return [late for rank, seen in self._seen.items() if (late := self._late(rank, seen)) is not None]

    def _updated(self, seen: _Seen | None, record: RankRecord) -> _Seen:
        now_s = self._clock_s
        if seen is None:
            return _Seen(record, now_s, now_s, now_s)
        before, seen.record = seen.record, record
        if record.beat != before.beat:
            seen.beat_s = now_s
        if record.place != before.place:
            seen.place_s, seen.behind_s = now_s, None
        if record.place[:2] != before.place[:2]:
            if seen.step_s > self._unmeasured_s:
                self.slowest_s = max(self.slowest_s, now_s - seen.step_s)
            seen.step_s = now_s
        return seen

    def _late(self, rank: int, seen: _Seen) -> Late | None:
        bound_s = self.limits.report_s + self.slowest_s
        own_s = self._clock_s - (seen.beat_s if seen.behind_s is None else min(seen.beat_s, seen.behind_s))
        if own_s <= bound_s:
            return None
        others = [each for other, each in self._seen.items() if other != rank and not self._is_silent(each)]
        waited_s = min(own_s, max((self._clock_s - each.place_s for each in others), default=0.0))
        if waited_s <= bound_s:
            return None
        activity, is_silent = seen.record.position.activity, self._is_silent(seen)
        state = self._process_state(seen.record) if is_silent else None
        if activity is Activity.DEBUGGED or state == "tracing-stop" or (is_silent and activity is Activity.OUTSIDE):
            return None
        has_limit = activity is Activity.STEP or state == "stopped"
        left_s = self.limits.end_s + self.slowest_s - waited_s if has_limit else None
        return Late(rank, seen.record, waited_s, left_s, is_silent, state)

    def _is_silent(self, seen: _Seen) -> bool:
        return self._clock_s - seen.beat_s > self.limits.report_s + self.slowest_s


def _find_behind(seen: Iterable[_Seen], now_s: float) -> None:
    """Record the time at which each rank fell behind."""
    ranks = list(seen)
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for each in ranks:
        for group, count in each.record.calls.items():
            least[group] = min(least.get(group, count), count)
            most[group] = max(most.get(group, count), count)
    for each in ranks:
        calls = each.record.calls.items()
        is_behind = any(count < most[group] for group, count in calls)
        if not is_behind or any(count > least[group] for group, count in calls):
            each.behind_s = None
        elif each.behind_s is None:
            each.behind_s = now_s
