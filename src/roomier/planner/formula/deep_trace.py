"""Traces of deep models, which are computed by tracing only a few blocks in each row of equal blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from roomier.core.errors import PlanError
from roomier.plan import Plan
from roomier.planner.dry_runs.repeats import Repeat, find_repeats, report_full_trace, shallow_copy
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.formula.trace import Execution, Trace, take_trace
from roomier.planner.workload import Workload

_NUM_TRACED = 3  # number of traced periods: the first period, one in the middle, and the last
_LEAST = _NUM_TRACED + 2


def take_deep_trace(workload: Workload, plan: Plan, *, is_sharded: bool, like: str = "cpu") -> Trace:
    """Return the same result as :func:`roomier.planner.formula.trace.take_trace`, but trace only a few blocks of a deep
    model.

    If a model contains a row of equal blocks, a copy with three periods of these blocks is traced. The executions of
    the middle period are repeated for the full length of the row (see [Note: equal blocks] in
    :mod:`roomier.planner.dry_runs.repeats`).

    Args:
        workload: module and micro-batch.
        plan: plan from which only the techniques that act inside the forward pass are applied.
        is_sharded: True to trace the model as if it were sharded across ranks.
        like: kind of the device; see :func:`roomier.planner.fake.fake_world.fake_world`.

    Raises:
        RoomierError: ``build`` rejects the plan.
    """
    repeats = find_repeats(workload, plan, least=_LEAST)
    if repeats:
        try:
            return _from_shallow_copies(
                workload, repeats, lambda given: take_trace(given, plan, is_sharded=is_sharded, like=like)
            )
        except PlanError:
            raise
        except Exception as error:  # a model with fewer blocks than it was constructed with can raise any exception
            report_full_trace(workload.module, repeats, error)
    return take_trace(workload, plan, is_sharded=is_sharded, like=like)


def _from_shallow_copies(workload: Workload, repeats: Sequence[Repeat], take: Callable[[Workload], Trace]) -> Trace:
    def at(counts: Sequence[int]) -> _Shallow:
        module = shallow_copy(workload.module, repeats, counts).module
        return _Shallow(take(replace(workload, module=module)), _blocks(repeats, counts))

    counts = [_NUM_TRACED] * len(repeats)
    base = at(counts)
    others = [list(each.executions) for each in base.visits if each.row is None]
    for row, repeat in enumerate(repeats):
        if base.keeps_memory(row):  # for example, autocast's copies of weights, which are freed after the row
            deeper = at([count + (number == row) for number, count in enumerate(counts)])
            more = [each.executions for each in deeper.visits if each.row is None]
            for mine, theirs in zip(others, more, strict=True):
                mine[:] = [
                    execution.between(other, repeat.count - _NUM_TRACED)
                    for execution, other in zip(mine, theirs, strict=True)
                ]
    return _written_out(base, others)


def _written_out(base: _Shallow, others: Sequence[list[Execution]]) -> Trace:
    """Return the trace of the full model. This trace alternates between the executions of ``others`` and the repeated
    visits to middle blocks."""
    executions: list[Execution] = []
    waiting = iter(others)
    for visit in base.visits:
        if visit.row is None:
            executions += [replace(each, place=base.names(each.place)[0]) for each in next(waiting)]
            continue
        times = range(max(len(base.names(each.place)) for each in visit.executions))
        for time in times if visit.executions[0].phase == "forward" else times[::-1]:
            executions += [
                replace(each, place=base.names(each.place)[time] if each.place else "") for each in visit.executions
            ]
    work: dict[WorkKey, Work] = {}
    for (phase, place), amount in base.trace.work.items():
        for name in base.names(place):
            work[phase, name] = amount
    saved_bytes = {name: sizes for place, sizes in base.trace.saved_bytes.items() for name in base.names(place)}
    return replace(base.trace, executions=tuple(executions), work=work, saved_bytes=saved_bytes)


@dataclass(frozen=True)
class _Block:
    """The blocks of the full model that one block of a shallow model represents.

    Attributes:
        row: number of the block's row.
        is_middle: whether the block is neither in the first nor in the last period.
        names: names of the represented blocks in the full model.
    """

    row: int
    is_middle: bool
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Stretch:
    """Group of consecutive executions: a middle block and the part after it, or parts outside the middle blocks.

    Attributes:
        row: number of the row if the executions belong to a middle block of this row or to the part after the block;
            None for all other executions.
        executions: the executions, in the order in which they run.
    """

    row: int | None
    executions: tuple[Execution, ...]


class _Shallow:
    """The trace of a shallow model, and the blocks of the full model that its blocks represent."""

    def __init__(self, trace: Trace, blocks: Mapping[str, _Block]) -> None:
        self.trace = trace
        self._blocks = blocks
        self._row: int | None = None
        self._phase = ""
        groups = groupby(trace.executions, self._row_at)
        self.visits = [_Stretch(row[1], tuple(executions)) for row, executions in groups]

    def names(self, place: str) -> tuple[str, ...]:
        """Return the names that the part ``place`` has in the full model."""
        return self._blocks[place].names if place in self._blocks else (place,)

    def keeps_memory(self, row: int) -> bool:
        """Return whether memory other than gradients remains allocated after the forward and backward passes of a
        middle block."""
        ends = [each.end for visit in self.visits if visit.row == row for each in visit.executions]
        return any((sum(each.activation for each in ends), sum(each.temporary for each in ends)))

    def _row_at(self, execution: Execution) -> tuple[str, int | None]:
        block = self._blocks.get(execution.place)
        if execution.place:
            self._row = block.row if block is not None and block.is_middle else None
        elif execution.phase != self._phase:
            self._row = None
        self._phase = execution.phase
        return execution.phase if self._row is not None else "", self._row


def _blocks(repeats: Sequence[Repeat], counts: Sequence[int]) -> dict[str, _Block]:
    """Return the blocks, by their names, in a model that has ``counts`` periods of each of ``repeats``."""
    found: dict[str, _Block] = {}
    left_out: dict[str, int] = {}  # number of omitted blocks of the container before this row
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
