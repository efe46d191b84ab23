"""The step of a deep model, computed from dry runs of copies with fewer blocks.

[Note: depth]
If a model has rows of equal blocks (see :mod:`roomier.planner.dry_runs.repeats`), a copy with four periods of each row
is traced. This copy contains the first two and the last two periods of the row. For each row, another copy has one
additional period in the middle. The timelines of the two copies are equal except for the visits to the additional
period, one in each forward and one in each backward pass. The difference between the timelines is the effect of one
period on all points in time outside the visits. The difference between the end and the start of a visit is the effect
of the visit on the following intervals. The timeline of the full model repeats the visit for each omitted period, and
each visit includes the effects of the previous visits.

Two periods on each side are required, because each end of the row affects one adjacent block inside the row. Buffers of
the last block are sent during the computation of the previous block, and no all-gather precedes the first block. The
result is verified. If the timelines have different intervals outside the visits, or if the effect of a visit is
inconsistent with the difference between the timelines, the full model is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from roomier.api.module import network_of
from roomier.core.errors import PlanError
from roomier.plan import Plan
from roomier.planner.dry_runs.budget_estimates import TYPICAL_DEVICE
from roomier.planner.dry_runs.dry_run import DryRun, dry_run
from roomier.planner.dry_runs.repeats import Repeat, Shallow, find_repeats, report_full_trace, shallow_copy
from roomier.planner.dry_runs.within_budget import UNIFORM, within_budget
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.fake.user_code import UnexpectedStepError
from roomier.planner.hardware.machine import Device
from roomier.planner.memory.kinds import Interval, NumBytes, added
from roomier.planner.workload import Workload
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.budget import BudgetTooSmallError

_NUM_FIRST = _NUM_LAST = 2  # number of periods at each end of a row that are always traced
_NUM_TRACED = _NUM_FIRST + _NUM_LAST
_LEAST = _NUM_TRACED + 2  # shorter rows are traced in full


class _IsNotLinear(UnexpectedStepError):  # noqa: N818 - handled in this module, not an error
    """Raised if memory does not grow linearly with the number of blocks, so the full model must be traced."""

    def __str__(self) -> str:
        return "needs memory that does not grow linearly with the number of blocks"


def dry_run_by_depth(
    workload: Workload,
    plan: Plan,
    *,
    rank: int = 0,
    is_pairwise: bool = True,
    like: str = "cpu",
    device: Device = TYPICAL_DEVICE,
) -> DryRun:
    """Return the same result as :func:`roomier.planner.dry_runs.dry_run.dry_run`, but trace only a few blocks of a deep
    model.

    See [Note: depth]. With an activation budget, the step of a deep model is computed from three steps without a
    budget; see [Note: a step within a budget].

    Raises:
        RoomierError: ``build`` rejects the plan, or an activation budget is too small.
    """

    def run(traced: Workload, given: Plan = plan) -> DryRun:
        return dry_run(traced, given, rank=rank, is_pairwise=is_pairwise, like=like, device=device)

    if plan.activation.policy == "budget":
        uniform = {keep: replace(plan, activation=activation) for keep, activation in UNIFORM.items()}
    else:
        uniform = {Keep.ALL: plan}
    repeats = find_repeats(workload, uniform[Keep.ALL], least=_LEAST)
    if _saves(repeats):
        try:
            runs = {
                keep: _from_shallow_copies(workload, repeats, partial(run, given=given))
                for keep, given in uniform.items()
            }
            if plan.activation.policy != "budget":
                return runs[Keep.ALL]
            blocks = {name for name, each in network_of(workload.module).named_modules() if each in workload.blocks}
            return within_budget(plan, runs, blocks, device)
        except (PlanError, BudgetTooSmallError):
            raise
        except Exception as error:  # a model with fewer blocks than it was constructed with can raise any exception
            report_full_trace(workload.module, repeats, error)
    return run(workload)


def _saves(repeats: Sequence[Repeat]) -> bool:
    """Return whether the shallow copies together have fewer blocks than the model."""
    num_own = sum(_NUM_TRACED * each.length for each in repeats)
    num_traced = num_own * (1 + len(repeats)) + sum(each.length for each in repeats)
    return num_traced < sum(each.count * each.length for each in repeats)


def _from_shallow_copies(workload: Workload, repeats: list[Repeat], trace: Callable[[Workload], DryRun]) -> DryRun:
    def at(*counts: int) -> _Timeline:
        shallow = shallow_copy(workload.module, repeats, counts, num_last=_NUM_LAST)
        return _Timeline(trace(replace(workload, module=shallow.module)), shallow)

    counts = [_NUM_TRACED] * len(repeats)
    base = at(*counts)
    rows = []
    for index, repeat in enumerate(repeats):
        deeper = at(*(count + (index == number) for number, count in enumerate(counts)))
        rows.append(_Row(index, repeat, base, deeper))
    return DryRun(tuple(_intervals(base, rows)), _work(base, rows))


class _Timeline:
    """The step of a shallow copy, with the part names of the full model.

    Attributes:
        work: amount of computation by part.
        visits: groups of consecutive intervals. Each group is paired with the number of its row if it is the middle
            period of this row, otherwise with None.
        intervals: all intervals, in execution order.
    """

    def __init__(self, run: DryRun, shallow: Shallow) -> None:
        self.work = {(phase, shallow.place_in_model(place)): each for (phase, place), each in run.work.items()}
        self.visits = shallow.visits(run.intervals)
        self.intervals = [each for _, group in self.visits for each in group]


class _Row:
    """Effect of one additional period in a row of blocks.

    Attributes:
        repeat: the row of equal blocks.
        num_more: number of periods of the model that were not traced.
        by_depth: for each interval of the base timeline, the bytes that an additional period adds at its start, its
            peak and its end.
        visits: intervals of the visits to the additional period, by the index of the base interval that follows.
        work: work that an additional period causes outside its blocks.
        own_work: work of the blocks in the period.
    """

    def __init__(self, number: int, repeat: Repeat, base: _Timeline, deeper: _Timeline) -> None:
        self.repeat = repeat
        self.num_more = repeat.count - _NUM_TRACED
        self.by_depth: list[list[NumBytes]] = []
        self.visits: dict[int, list[Interval]] = {}
        for row, intervals in deeper.visits:
            if row == number:
                self.visits[len(self.by_depth)] = intervals
            else:
                self._align(base, intervals)
        if len(self.by_depth) != len(base.intervals):
            raise _IsNotLinear
        for index, visit in self.visits.items():
            # For any number of periods, the bytes at the end of the last visit must equal the bytes at the start of the
            # next interval.
            if added(self.by_depth[index - 1][2], _growth(visit)) != self.by_depth[index][0]:
                raise _IsNotLinear
        own = set(repeat.places(_NUM_FIRST))
        parts = {part for part in {*base.work, *deeper.work} if part[1] not in own}
        self.work = {part: deeper.work.get(part, Work()) + base.work.get(part, Work()) * -1 for part in parts}
        self.own_work = {part: work for part, work in deeper.work.items() if part[1] in own}

    def _align(self, base: _Timeline, intervals: list[Interval]) -> None:
        for interval in intervals:
            index = len(self.by_depth)
            if index >= len(base.intervals):
                raise _IsNotLinear
            before = base.intervals[index]
            if (before.phase, before.place) != (interval.phase, interval.place):
                raise _IsNotLinear
            moments = zip(interval.moments, before.moments, strict=True)
            self.by_depth.append([added(now, then, -1) for now, then in moments])

    def goes_up(self, base: _Timeline, index: int) -> bool:
        """Return True if the periods of the row are visited in ascending order before interval ``index`` of the base,
        as in a forward pass. Return False if the order is descending, as in a backward pass."""
        for interval in reversed(base.intervals[:index]):
            if interval.place in self.repeat.places(_NUM_FIRST - 1):
                return True
            if interval.place in self.repeat.places(self.repeat.count - _NUM_LAST):
                return False
        raise _IsNotLinear


def _growth(visit: Sequence[Interval]) -> NumBytes:
    """Return the growth in bytes from the start to the end of a visit."""
    return added(visit[-1].end, visit[0].begin, -1)


def _intervals(base: _Timeline, rows: Sequence[_Row]) -> Iterator[Interval]:
    for index, interval in enumerate(base.intervals):
        for row in rows:
            if index in row.visits:
                yield from _visits(base, rows, row, index)
        changes = [[(row.by_depth[index][moment], row.num_more) for row in rows] for moment in range(3)]
        yield _raised(interval, interval.place, changes)


def _visits(base: _Timeline, rows: Sequence[_Row], row: _Row, index: int) -> Iterator[Interval]:
    visit, goes_up = row.visits[index], row.goes_up(base, index)
    # Memory that the other rows and the other added periods of this row hold. This memory is the same during all
    # visits.
    depth = [(each.by_depth[index - 1][2], each.num_more - (each is row)) for each in rows]
    names = row.repeat.places(_NUM_FIRST)
    for number in range(row.num_more):
        period = _NUM_FIRST + (number if goes_up else row.num_more - 1 - number)
        places = dict(zip(names, row.repeat.places(period), strict=True))
        for interval in visit:
            yield _raised(interval, places.get(interval.place, ""), [[*depth, (_growth(visit), number)]] * 3)


def _raised(interval: Interval, place: str, more: Sequence[Sequence[tuple[NumBytes, int]]]) -> Interval:
    """Return ``interval`` for the part ``place``, with additional bytes.

    Args:
        more: for the start, the peak and the end of the interval, pairs of bytes by kind and the factor by which these
            bytes are multiplied.
    """
    found = []
    for num_bytes, changes in zip(interval.moments, more, strict=True):
        for change, times in changes:
            num_bytes = added(num_bytes, change, times)
        if min(num_bytes.values()) < 0:
            raise _IsNotLinear
        found.append(num_bytes)
    return Interval(interval.phase, place, *found)


def _work(base: _Timeline, rows: Sequence[_Row]) -> dict[WorkKey, Work]:
    found: dict[WorkKey, Work] = {}
    for part in {part for row in rows for part in row.work}:
        found[part] = sum((row.work.get(part, Work()) * row.num_more for row in rows), base.work.get(part, Work()))
    for row in rows:
        names = row.repeat.places(_NUM_FIRST)
        for (phase, place), work in row.own_work.items():
            for period in range(_NUM_FIRST, _NUM_FIRST + row.num_more):
                found[phase, row.repeat.places(period)[names.index(place)]] = work
    return found
