"""A trace of a deep model in the time of a few blocks: those in the middle of a row of equal ones are seen once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from roomier.core.errors import PlanError
from roomier.plan import Plan
from roomier.planner.dry_runs.repeats import Repeat, find_repeats, shallow_copy, tell_traced_whole
from roomier.planner.dry_runs.work import Part, Work
from roomier.planner.formula.trace import Passage, Trace, take_trace
from roomier.planner.workload import Workload

_NUM_TRACED = 3  # periods: the first and the last differ from those between
_LEAST = _NUM_TRACED + 2


def take_deep_trace(workload: Workload, plan: Plan, *, is_cut: bool, like: str = "cpu") -> Trace:
    """As :func:`roomier.planner.formula.trace.take_trace`.

    Where equal blocks stand in a row, a model with three periods of them is traced, and the passages of the middle one
    are written down as often as the row is long (see [Note: equal blocks] in :mod:`roomier.planner.dry_runs.repeats`).

    Raises:
        RoomierError: what ``build`` refuses.
    """
    repeats = find_repeats(workload, plan, least=_LEAST)
    if repeats:
        try:
            return _from_shallow_copies(
                workload, repeats, lambda given: take_trace(given, plan, is_cut=is_cut, like=like)
            )
        except PlanError:
            raise
        except Exception as error:  # whatever a model does with fewer blocks than it was made with
            tell_traced_whole(workload.module, repeats, error)
    return take_trace(workload, plan, is_cut=is_cut, like=like)


def _from_shallow_copies(workload: Workload, repeats: Sequence[Repeat], take: Callable[[Workload], Trace]) -> Trace:
    def at(counts: Sequence[int]) -> _Shallow:
        module = shallow_copy(workload.module, repeats, counts).module
        return _Shallow(take(replace(workload, module=module)), _blocks(repeats, counts))

    counts = [_NUM_TRACED] * len(repeats)
    base = at(counts)
    others = [list(each.passages) for each in base.visits if each.row is None]
    for row, repeat in enumerate(repeats):
        if base.leaves_something(row):  # autocast's copies of weights, say: what is behind the row frees them
            deeper = at([count + (number == row) for number, count in enumerate(counts)])
            more = [each.passages for each in deeper.visits if each.row is None]
            for mine, theirs in zip(others, more, strict=True):
                mine[:] = [
                    passage.between(other, repeat.count - _NUM_TRACED)
                    for passage, other in zip(mine, theirs, strict=True)
                ]
    return _written_out(base, others)


def _written_out(base: _Shallow, others: Sequence[list[Passage]]) -> Trace:
    """The whole model: the visits to middle blocks as often as they are made, between ``others``."""
    passages: list[Passage] = []
    waiting = iter(others)
    for visit in base.visits:
        if visit.row is None:
            passages += [replace(each, place=base.names(each.place)[0]) for each in next(waiting)]
            continue
        times = range(max(len(base.names(each.place)) for each in visit.passages))
        for time in times if visit.passages[0].phase == "forward" else times[::-1]:
            passages += [
                replace(each, place=base.names(each.place)[time] if each.place else "") for each in visit.passages
            ]
    work: dict[Part, Work] = {}
    for (phase, place), amount in base.trace.work.items():
        for name in base.names(place):
            work[phase, name] = amount
    return replace(base.trace, passages=tuple(passages), work=work)


@dataclass(frozen=True)
class _Block:
    """What a block of a shallow model stands for.

    Attributes:
        row: the number of its row.
        is_middle: neither in the first nor in the last period.
        names: in the whole model, one for each that it stands for.
    """

    row: int
    is_middle: bool
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Visit:
    """Passages in a row: those of a middle block of a ``row``, with what lies behind it; or what is between these."""

    row: int | None
    passages: tuple[Passage, ...]


class _Shallow:
    """The trace of a shallow model, and what its blocks stand for."""

    def __init__(self, trace: Trace, blocks: Mapping[str, _Block]) -> None:
        self.trace = trace
        self._blocks = blocks
        self._row: int | None = None
        self._phase = ""
        groups = groupby(trace.passages, self._row_at)
        self.visits = [_Visit(row[1], tuple(passages)) for row, passages in groups]

    def names(self, place: str) -> tuple[str, ...]:
        return self._blocks[place].names if place in self._blocks else (place,)

    def leaves_something(self, row: int) -> bool:
        """Whether a visit in the forward and one in the backward leave other than gradients."""
        ends = [each.end for visit in self.visits if visit.row == row for each in visit.passages]
        return any((sum(each.activation for each in ends), sum(each.temporary for each in ends)))

    def _row_at(self, passage: Passage) -> tuple[str, int | None]:
        block = self._blocks.get(passage.place)
        if passage.place:
            self._row = block.row if block is not None and block.is_middle else None
        elif passage.phase != self._phase:
            self._row = None
        self._phase = passage.phase
        return passage.phase if self._row is not None else "", self._row


def _blocks(repeats: Sequence[Repeat], counts: Sequence[int]) -> dict[str, _Block]:
    """By their names in a model with ``counts`` periods of each of ``repeats``."""
    found: dict[str, _Block] = {}
    left_out: dict[str, int] = {}  # blocks of the container, before this row
    for row, (repeat, count) in enumerate(zip(repeats, counts, strict=True)):
        prefix = f"{repeat.container}." if repeat.container else ""
        shift = left_out.get(repeat.container, 0)
        for period in range(count):
            is_middle = 0 < period < count - 1
            real = range(1, repeat.count - 1) if is_middle else [0] if period == 0 else [repeat.count - 1]
            for index in range(repeat.length):
                position = repeat.first - shift + period * repeat.length + index
                names = tuple(repeat.places(each)[index] for each in real)
                found[f"{prefix}{position}"] = _Block(row, is_middle, names)
        left_out[repeat.container] = shift + (repeat.count - count) * repeat.length
    return found
