"""A step of a deep model, from dry runs of copies in which its blocks repeat less often.

[Note: depth]
Where equal blocks stand in a row (see :mod:`roomier.planner.repeats`) a copy with three periods of each is traced, and
for each row one with a period more. The two timelines are the same but for what the second middle period adds: a visit
in each forward and backward. So each number of bytes is linear in the number of periods: the difference of the two
timelines is what a period more adds there, and the difference between the two visits is what a visit adds to the next.
From these the timeline of the whole depth is written down, visit by visit.

Nothing is taken for granted. What a visit adds to the next must be the same at each of its stretches, and what the last
visit itself adds: else something of the first or the last block is still there in the middle ones (buffers that travel
between ranks on a CPU are), and five periods are traced. Where that does not do either, or the timelines are not the
same but for the visits, the whole model is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from roomier.api.forward import network_of
from roomier.core.errors import PlanError
from roomier.memory.kinds import Kind, total_bytes
from roomier.plan import Plan
from roomier.planner.dry_run import DryRun, NumBytes, Stretch, dry_run
from roomier.planner.repeats import Repeat, Shallow, find_repeats, shallow_copy
from roomier.planner.work import Part, Work
from roomier.planner.workload import Workload

_NUMS_TRACED = (3, 5)  # periods, odd: the one in the middle stands for those left out
_LEAST = 6  # periods of a row that is worth it


class _IsNotLinear(Exception):  # noqa: N818 - says what was found; it is never raised to a caller
    """The timelines of two depths do not tell that of another."""


def dry_run_by_depth(
    workload: Workload, plan: Plan, *, rank: int = 0, is_pairwise: bool = True, like: str = "cpu"
) -> DryRun:
    """As :func:`roomier.planner.dry_run.dry_run`, in the time of a few blocks where the model has many.

    See [Note: depth].

    Raises:
        RoomierError: what ``build`` refuses.
    """

    def trace(traced: Workload) -> DryRun:
        return dry_run(traced, plan, rank=rank, is_pairwise=is_pairwise, like=like)

    for num_traced in _NUMS_TRACED:
        repeats = find_repeats(network_of(workload.module), plan, least=max(num_traced + 2, _LEAST))
        if not repeats:
            break
        try:
            return _from_shallow_copies(workload, repeats, num_traced, trace)
        except _IsNotLinear:
            continue
        except PlanError:
            raise
        except Exception:
            pass
    return trace(workload)


def _from_shallow_copies(
    workload: Workload, repeats: list[Repeat], num_traced: int, trace: Callable[[Workload], DryRun]
) -> DryRun:
    num_before = num_traced // 2  # periods before the middle, and behind it

    def at(*counts: int) -> _Timeline:
        shallow = shallow_copy(workload.module, repeats, counts, num_last=num_before)
        run = trace(replace(workload, module=shallow.module))
        middles = [
            (repeat, range(num_before, count - num_before)) for repeat, count in zip(repeats, counts, strict=True)
        ]
        return _Timeline(run, shallow, middles)

    counts = [num_traced] * len(repeats)
    base = at(*counts)
    rows = []
    for index, repeat in enumerate(repeats):
        deeper = at(*(count + (index == number) for number, count in enumerate(counts)))
        rows.append(_Row(index, repeat, num_before, base, deeper))
    return DryRun(tuple(_stretches(base, rows)), _work(base, rows))


@dataclass(frozen=True)
class _Token:
    """A stretch.

    Attributes:
        key: what stretches of two depths have in common that are the same.
        row: of the blocks that this or the last stretch with a name belongs to, if they are of a middle period; else
            None.
        period: of these blocks.
    """

    stretch: Stretch
    key: tuple[str, str]
    row: int | None
    period: int


class _Timeline:
    """The step of a shallow copy, under the names of the whole model."""

    def __init__(self, run: DryRun, shallow: Shallow, middles: Sequence[tuple[Repeat, range]]) -> None:
        middle = {
            place: (number, period, repeat.places(periods[0])[offset])
            for number, (repeat, periods) in enumerate(middles)
            for period in periods
            for offset, place in enumerate(repeat.places(period))
        }
        self.work = {(phase, shallow.place_in_model(place)): each for (phase, place), each in run.work.items()}
        self.tokens: list[_Token] = []
        row, period = None, 0
        for each in run.stretches:
            stretch = replace(each, place=shallow.place_in_model(each.place))
            name = stretch.place
            if name in middle:
                row, period, name = middle[name]
            elif name or each.phase == "update":  # what has no name belongs to the block before
                row, period = None, 0
            self.tokens.append(_Token(stretch, (each.phase, name), row, period))

    def visits(self) -> list[list[_Token]]:
        """The tokens, those of one middle period in a row together, and those between."""
        return [list(group) for _, group in groupby(self.tokens, lambda each: (each.row, each.period))]


class _Row:
    """What another period of a row of blocks adds.

    Attributes:
        middle: the first of the middle periods.
        last: the last of them in the model.
        num_more: how many of them were not traced.
        by_depth: token of the base -> bytes that another period adds there.
        by_visit: token of the base, of a middle period -> bytes that another visit adds to the next.
        goes_up: token of the base, of a middle period -> whether the visit is followed by that of the next period.
        work: of a period more, of all that does not belong to it.
    """

    def __init__(self, number: int, repeat: Repeat, num_before: int, base: _Timeline, deeper: _Timeline) -> None:
        self.repeat = repeat
        self.middle = num_before
        self.last = repeat.count - 1 - num_before
        self.num_more = self.last - self.middle
        self.by_depth: list[_Change] = []
        self.by_visit: dict[int, _Change] = {}
        self.goes_up: dict[int, bool] = {}
        visits = iter(deeper.visits())
        for group in visits:
            again = next(visits, []) if group[0].row == number else []
            for token in group:
                position = len(self.by_depth)
                if position >= len(base.tokens) or base.tokens[position].key != token.key:
                    raise _IsNotLinear
                self.by_depth.append(_Change.between(base.tokens[position].stretch, token.stretch))
            if group[0].row == number:
                self._note_visits(position + 1 - len(group), group, again)
        if len(self.by_depth) != len(base.tokens):
            raise _IsNotLinear
        added = set(repeat.places(num_before + 1))
        parts = {part for part in {*base.work, *deeper.work} if part[1] not in added}
        self.work = {part: deeper.work.get(part, Work()) + base.work.get(part, Work()) * -1 for part in parts}

    def _note_visits(self, begin: int, first: list[_Token], second: list[_Token]) -> None:
        if [each.key for each in first] != [each.key for each in second] or first[0].row != second[0].row:
            raise _IsNotLinear
        added = _sum(second[-1].stretch.end, second[0].stretch.begin, -1)
        for position, (one, other) in enumerate(zip(first, second, strict=True), begin):
            self.by_visit[position] = change = _Change.between(one.stretch, other.stretch)
            self.goes_up[position] = one.period < other.period
            if not (change.begin == change.end == added and total_bytes(change.peak) == total_bytes(added)):
                raise _IsNotLinear


@dataclass(frozen=True)
class _Change:
    """Bytes by kind that are added to a stretch: at its begin, its peak, its end."""

    begin: NumBytes
    peak: NumBytes
    end: NumBytes

    @classmethod
    def between(cls, one: Stretch, other: Stretch) -> _Change:
        return cls(*(_sum(getattr(other, at), getattr(one, at), -1) for at in _MOMENTS))


_MOMENTS = ("begin", "peak", "end")


def _sum(one: Mapping[Kind, int], other: Mapping[Kind, int], factor: int) -> NumBytes:
    return {kind: one.get(kind, 0) + factor * other.get(kind, 0) for kind in Kind}


def _stretches(base: _Timeline, rows: Sequence[_Row]) -> Iterator[Stretch]:
    position = 0
    for visit in base.visits():
        row = None if visit[0].row is None else rows[visit[0].row]
        for number in range(1 if row is None else row.num_more + 1):
            for offset, token in enumerate(visit, position):
                changes = [(each.by_depth[offset], each.num_more) for each in rows]
                place = token.stretch.place
                if row is not None:
                    changes.append((row.by_visit[offset], number))
                    period = row.middle + number if row.goes_up[offset] else row.last - number
                    place = _place_at(row.repeat, token, period)
                yield _changed(token.stretch, place, changes)
        position += len(visit)


def _place_at(repeat: Repeat, token: _Token, period: int) -> str:
    if not token.stretch.place:
        return ""
    return repeat.places(period)[repeat.places(token.period).index(token.stretch.place)]


def _changed(stretch: Stretch, place: str, changes: list[tuple[_Change, int]]) -> Stretch:
    found = []
    for moment in _MOMENTS:
        num_bytes: NumBytes = getattr(stretch, moment)
        for change, times in changes:
            num_bytes = _sum(num_bytes, getattr(change, moment), times)
        if min(num_bytes.values()) < 0:
            raise _IsNotLinear
        found.append(num_bytes)
    return Stretch(stretch.phase, place, *found)


def _work(base: _Timeline, rows: Sequence[_Row]) -> dict[Part, Work]:
    middle = {place: row for row in rows for place in row.repeat.places(row.middle)}
    found: dict[Part, Work] = {}
    for part in {part for row in rows for part in row.work}:
        phase, place = part
        own = middle.get(place)
        if own is None:
            work = sum((row.work.get(part, Work()) * row.num_more for row in rows), base.work.get(part, Work()))
            found[part] = work
            continue
        offset = own.repeat.places(own.middle).index(place)
        for period in range(own.middle, own.last + 1):
            found[phase, own.repeat.places(period)[offset]] = base.work[part]
    return found
