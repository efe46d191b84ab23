"""Closed-form forecast of the memory of a step: computed for any strategy from one trace of the model, without running
a step.

[Note: closed form]
The closed form adds two sources. A :class:`~roomier.planner.formula.trace.Trace` contains the growth of activations and
temporaries while each part of the model runs, and determines the order of the parts. A
:class:`~roomier.planner.memory.walk.Walk` simulates the model states: which weights are all-gathered, and which
gradients are sent and reduced, when a part starts and ends. The states that the walk records at the start and the end
of a part are added to the trace at these two moments. In between, the state of the walk is constant and is added to the
largest growth in the trace. Unsharded gradients are counted in the trace until the walk counts them.

With gradient accumulation, only three micro-batches are computed: the first, the last, and one that represents all
others, because their memory is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from roomier.planner.dry_runs.places import is_inside
from roomier.planner.formula.offloaded import Offloaded
from roomier.planner.formula.trace import Execution, Rise, Trace, Visit
from roomier.planner.memory.kinds import Interval, Kind
from roomier.planner.memory.walk import KINDS, Layout, UnitBytes, Walk, in_order_of_gathering
from roomier.planner.memory.weights import Unit

_GRADIENT, _ACTIVATION, _TEMPORARY, _SENT = (
    KINDS.index(each) for each in (Kind.GRADIENT, Kind.ACTIVATION, Kind.TEMPORARY, Kind.COMMUNICATION)
)


@dataclass(frozen=True)
class States:
    """Bytes of the model states in one layout.

    Attributes:
        units: units in the order of the modules, starting with the root.
        sizes: sizes of the tensors of each unit.
        kept: bytes that exist between two steps, by kind, without gradients.
        gradient_bytes: size in bytes of all gradients of the unsharded model, in the dtype of its weights.
        update: temporary bytes of the optimizer by kind.
        away: model states in lower tiers, which are not in ``kept``.
    """

    units: Sequence[Unit]
    sizes: Sequence[UnitBytes]
    kept: Mapping[Kind, int]
    gradient_bytes: int
    update: Mapping[Kind, int]
    away: Offloaded = field(default_factory=Offloaded)


def timeline(trace: Trace, states: States, layout: Layout, order: UnitOrder | None = None) -> tuple[Interval, ...]:
    """Return one optimizer step as intervals; see [Note: closed form].

    Args:
        trace: trace of one micro-batch, recorded for a sharded model if ``layout`` is sharded.
        states: model states in ``layout``.
        layout: strategy and its settings.
        order: order of the units in ``trace``; None computes the order.
    """
    step: _WholeStep | _CutStep
    if layout.is_sharded:
        step = _CutStep(trace, states, layout, order or UnitOrder(trace, states.units))
    else:
        step = _WholeStep(trace, states, layout)
    intervals = [each for index in _micro_batches(layout) for each in step.micro_batch(index)]
    return (*intervals, step.update())


def _micro_batches(layout: Layout) -> Sequence[int]:
    last = layout.num_micro_batches - 1
    if layout.strategy in ("zero2", "zero3", "hsdp"):  # the last micro-batch equals the previous ones
        return (0, last) if last else (0,)
    return (0, 1, last) if last > 1 else range(last + 1)


class _StepTimeline:
    def __init__(self, trace: Trace, states: States, layout: Layout) -> None:
        self.trace = trace
        self.states = states
        self.layout = layout
        self._num_batches = layout.num_micro_batches if layout.holds_all_batches else 1  # that exist at the same time
        self.other_batches_bytes = trace.batch_bytes * (self._num_batches - 1)
        self.owned = [states.kept.get(kind, 0) for kind in KINDS]

    def update(self) -> Interval:
        """Return the interval of the optimizer update, including the batches that the training loop still
        references."""
        self.owned[_ACTIVATION] += self.trace.batch_bytes * self._num_batches
        begin = _by_kind(self.owned)
        peak = {kind: num_bytes + self.states.update.get(kind, 0) for kind, num_bytes in begin.items()}
        return Interval("update", "", begin, peak, begin)

    def with_level(self, base: Sequence[int], level: Rise, gradient_bytes: int) -> list[int]:
        """Return ``base`` plus the memory of the trace at ``level``, the gradients and the other batches."""
        now = list(base)
        now[_ACTIVATION] += level[0] + self.other_batches_bytes
        now[_TEMPORARY] += level[1]
        now[_GRADIENT] += gradient_bytes
        return now


class _WholeStep(_StepTimeline):
    """Step on one device or with DDP, in which the model is not sharded."""

    def __init__(self, trace: Trace, states: States, layout: Layout) -> None:
        super().__init__(trace, states, layout)
        self._is_ddp = layout.strategy == "ddp"
        if self._is_ddp:  # DDP's buckets
            self.owned[_GRADIENT] += states.gradient_bytes

    def micro_batch(self, index: int) -> Iterator[Interval]:
        is_last = index == self.layout.num_micro_batches - 1
        for visit in self.trace.visits:
            moments = [
                self.with_level(self.owned, each, self._gradient_bytes(each, index, is_last))
                for each in (visit.begin, self._highest(visit, index, is_last), visit.end)
            ]
            yield _interval(visit.execution, moments)

    def _highest(self, visit: Visit, index: int, is_last: bool) -> Rise:
        if self.layout.steps_in_backward:
            return visit.highest_reduced
        if self._is_ddp and is_last:
            return visit.highest_moved if index else visit.highest_reduced
        return visit.highest_reduced if index else visit.highest

    def _gradient_bytes(self, level: Rise, index: int, is_last: bool) -> int:
        """Return the size in bytes of the gradients outside the buckets of DDP. If the optimizer steps in the backward
        pass, only pending gradients exist."""
        if self.layout.steps_in_backward:
            return level.pending
        before = self.states.gradient_bytes if index else 0
        if self._is_ddp and is_last:
            complete = level.gradient - level.pending
            return level.pending + max(0, before - complete)
        return before + (level.pending if index else level.gradient)

    def update(self) -> Interval:
        if not self._is_ddp and not self.layout.steps_in_backward:
            self.owned[_GRADIENT] += self.states.gradient_bytes
        return super().update()


class _CutStep(_StepTimeline):
    """Step in which the model is sharded across ranks."""

    def __init__(self, trace: Trace, states: States, layout: Layout, order: UnitOrder) -> None:
        super().__init__(trace, states, layout)
        self._walk = Walk(states.units, layout, self.owned, states.sizes)
        self._order = order

    def micro_batch(self, index: int) -> Iterator[Interval]:
        is_last = index == self.layout.num_micro_batches - 1
        yield from self._forward()
        begin = self.trace.levels[self._order.num_forward]
        for number in range(self.layout.num_backwards):
            keeps = begin.activation if number < self.layout.num_backwards - 1 else None
            yield from self._backward(is_first=index == 0, is_last=is_last, is_again=number > 0, kept_bytes=keeps)

    def _forward(self) -> Iterator[Interval]:
        walk, order = self._walk, self._order
        if order.root is not None:
            walk.enter(order.root, walk.gathered_ahead(order.root), "forward")
        for number in range(order.num_forward):
            visit = self.trace.visits[number]
            for unit in order.units_at[number]:
                walk.enter(unit, walk.gathered_ahead(unit), "forward")
            moments = self._with_notes(visit.begin, 0)
            moments.append(self.with_level(walk.now, visit.highest, 0))
            for unit in order.units_at[number]:
                walk.end_forward(unit)
            if number == order.num_forward - 1:
                walk.end_forward_of_all()
            moments.append(self.with_level(walk.now, visit.end, 0))
            yield _interval(visit.execution, moments)

    def _backward(self, *, is_first: bool, is_last: bool, is_again: bool, kept_bytes: int | None) -> Iterator[Interval]:
        walk, order = self._walk, self._order
        taken_over = 0  # bytes of the gradients that are counted in the walk
        adds_in_place = self.layout.accumulates_unsharded and not is_first
        waiting = list(order.gathering)
        last = len(self.trace.visits) - 1
        for number in range(order.num_forward, last + 1):
            visit = self.trace.visits[number]
            begin, end = visit.begin, visit.end
            highest = visit.highest_reduced if adds_in_place else visit.highest
            if kept_bytes is not None:
                begin, highest, end = (each._replace(activation=kept_bytes) for each in (begin, highest, end))
            whole_bytes = [
                (level.pending if adds_in_place else level.gradient) - taken_over for level in (begin, highest)
            ]
            if number == order.num_forward and order.root is not None and not is_again:
                walk.enter(order.root, waiting[:1], "backward")  # the root is first and prefetches the next unit
            for unit in order.units_at[number]:
                while unit in waiting:
                    next_one = waiting.pop(0)
                    walk.enter(next_one, waiting[:1] if not is_again else (), "backward")
            moments = self._with_notes(begin, whole_bytes[0])
            moments.append(self.with_level(walk.now, highest, whole_bytes[1]))
            for unit in order.ending_at[number]:
                walk.take_over_gradients(unit, is_first=is_first)
                if not (adds_in_place and walk.adds_in_place(unit)):
                    taken_over += walk.sizes[unit].gradient
                walk.end_backward(unit, is_first=is_first, is_last=is_last)
            if number == last:
                self._end_late(is_first=is_first, is_last=is_last)
            left = 0 if number == last else (end.pending if adds_in_place else end.gradient) - taken_over
            moments += self._with_notes(end, left)
            moments.append(self.with_level(walk.now, end, left))
            yield _interval(visit.execution, moments)

    def _end_late(self, *, is_first: bool, is_last: bool) -> None:
        """Complete the units whose backward pass ends with the backward pass of the model."""
        walk = self._walk
        for unit in self._order.late:
            walk.take_over_gradients(unit, is_first=is_first)
        for unit in self._order.late:
            walk.end_backward(unit, is_first=is_first, is_last=is_last)
        walk.end_backward_of_all()

    def _with_notes(self, level: Rise, gradient_bytes: int) -> list[list[int]]:
        return [self.with_level(note, level, gradient_bytes) for note in self._walk.take_notes()]


class UnitOrder:
    """Positions in a trace at which the units of a model are executed.

    Args:
        trace: trace of one micro-batch.
        units: units in the order of the modules.

    Attributes:
        root: unit whose weights remain unsharded between the forward and the backward pass; None if there is none.
        num_forward: number of executions that belong to the forward pass.
        units_at: for each execution, the units that are required when it starts. A block comes before its norms.
        ending_at: for each execution, the units whose backward pass ends when it ends. Norms come before their block.
        late: units whose backward pass ends only at the end of the model's backward pass.
        gathering: units in the order in which a backward pass all-gathers them.
    """

    def __init__(self, trace: Trace, units: Sequence[Unit]) -> None:
        executions = trace.executions
        roots = [number for number, unit in enumerate(units) if unit.is_root]
        self.root = roots[0] if roots else None
        self.num_forward = sum(each.phase == "forward" for each in executions)
        of_place = {place: _units_of(place, units) for place in {each.place for each in executions}}
        self.units_at = [
            [
                unit
                for unit in of_place[each.place]
                if each.phase == "forward" or each.needs_inner or not units[unit].is_inner
            ]
            for each in executions
        ]
        order = list(dict.fromkeys(unit for at in self.units_at[: self.num_forward] for unit in at))
        never = [number for number in range(len(units)) if number not in order and number not in roots]
        ends: dict[int, int] = {}
        for number in range(self.num_forward, len(executions)):
            for unit in of_place[executions[number].place]:
                ends[unit] = number
        self.late = [*roots, *(each for each in order if units[each].ends_late or each not in ends), *never]
        self.ending_at: list[list[int]] = [[] for _ in executions]
        for unit in reversed(order):
            if unit not in self.late:
                self.ending_at[ends[unit]].append(unit)
        self.gathering = [order[index] for index in in_order_of_gathering([units[unit] for unit in order])]


def _units_of(place: str, units: Sequence[Unit]) -> list[int]:
    """Return the indices of the units that a part of the model requires: its own unit, the units inside it, and the
    unit that contains it."""
    return [number for number, unit in enumerate(units) if place and not unit.is_root and is_inside(unit.name, place)]


def _interval(execution: Execution, moments: Sequence[Sequence[int]]) -> Interval:
    """Return the interval of ``execution``, whose start, peak and end are the first, the largest and the last of
    ``moments``."""
    return Interval(
        execution.phase, execution.place, _by_kind(moments[0]), _by_kind(max(moments, key=sum)), _by_kind(moments[-1])
    )


def _by_kind(num_bytes: Sequence[int]) -> dict[Kind, int]:
    return dict(zip(KINDS, num_bytes, strict=True))
