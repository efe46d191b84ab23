"""Traces: the memory that forward and backward passes use in addition to model states, recorded once for all
strategies.

[Note: traces and strategies]
One process runs one micro-batch in a fake environment, without an optimizer. The techniques of the plan that act inside
the forward pass are applied. Each :class:`Execution` contains the growth of tensors since its start. The sizes of the
model states that strategies shard are not recorded, but are calculated for each strategy and added to this growth. Two
effects inside a forward pass depend on sharding. If weights of matmuls are all-gathered in 16 bits, autocast creates no
copies of these weights, and the gradients have 16 bits. In addition, a view that a unit returns becomes a separate
tensor. Therefore, one trace is recorded for unsharded models, and another trace for sharded models.

[Note: pending gradients]
A gradient is *complete* when it has been added to the gradient of its parameter. Until then, the gradient is pending.
DDP copies a complete gradient into a bucket and frees the original. Later micro-batches add their gradients to the
existing gradients. In sharded models, 16-bit gradients remain pending, because later micro-batches add these gradients
to the 32-bit gradients only at the end of the unit's backward pass.

[Note: activations outside the device]
A dry run does not distinguish memory on the device and on the host, so both are calculated from a trace; see
[Note: two blocks at a time] in :mod:`roomier.techniques.activation.copies`. During the forward or backward pass of a
block, the device stores the activations of this block and the previous block. The host or the disk stores the
activations of all blocks. Tensors smaller than ``MIN_BYTES`` remain on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from roomier.api.hooks import step_of
from roomier.core.errors import PlanError
from roomier.core.tree import map_tensors, tensors
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.plan import BatchPlan, ChoicePlan, OffloadPlan, OptimizerPlan, ParallelPlan, Plan
from roomier.planner.dry_runs.places import named_places, reporting_places
from roomier.planner.dry_runs.repeats import Repeat, Shallow, find_repeats, report_full_trace, shallow_copy
from roomier.planner.dry_runs.work import Work, WorkCounter, WorkKey
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.shapes import shapes_of, shapes_of_batch
from roomier.planner.memory.kinds import Kind
from roomier.planner.memory.tracker import MemoryTracker, Snapshot, tracking
from roomier.planner.workload import Workload
from roomier.techniques.activation.copies import MIN_BYTES
from roomier.techniques.optim.configured import Configured
from roomier.techniques.parallel.shard import parts_of, root_parameters_of, units_of, without_views
from roomier.techniques.precision.policy import precision_of


class Rise(NamedTuple):
    """Growth in bytes.

    Attributes:
        activation: tensors that the forward pass saves for backward, including batches.
        temporary: all other tensors that are not model states.
        gradient: gradients of unsharded parameters.
        pending: part of ``gradient`` that is not complete; see [Note: pending gradients].
    """

    activation: int = 0
    temporary: int = 0
    gradient: int = 0
    pending: int = 0

    def plus(self, other: Rise) -> Rise:
        """Return the sum of this growth and ``other``."""
        return Rise(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def minus(self, other: Rise) -> Rise:
        """Return this growth minus ``other``."""
        return Rise(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Execution:
    """One execution of a part of the model in a forward or backward pass, with the growth of memory during the
    execution.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        place: name of the part; empty between parts.
        moments: growth since the start of the execution, after each change. The last element is the growth at the end.
        needs_inner: in a backward pass, whether the norms and embeddings in the part are required from this execution
            on; see :attr:`roomier.planner.memory.weights.Unit.is_inner`.
    """

    phase: str
    place: str
    moments: tuple[Rise, ...]
    needs_inner: bool = True

    @cached_property
    def highest(self) -> Rise:
        """Growth with the highest total."""
        return self.highest_by(1, 0)

    @cached_property
    def highest_reduced(self) -> Rise:
        """Growth with the highest total if complete gradients are freed."""
        return self.highest_by(0, 1)

    @cached_property
    def highest_moved(self) -> Rise:
        """Growth with the highest total if each complete gradient is freed together with the earlier gradient of its
        parameter."""
        return self.highest_by(-1, 2)

    def highest_by(self, gradient_weight: float, pending_weight: float) -> Rise:
        """Return the moment with the highest sum, which is calculated with the given weights for gradients and pending
        gradients."""
        return max(
            (Rise(), *self.moments),
            key=lambda each: (
                each.activation + each.temporary + gradient_weight * each.gradient + pending_weight * each.pending
            ),
        )

    @property
    def end(self) -> Rise:
        """Growth at the end."""
        return self.moments[-1]

    def between(self, other: Execution, share: float) -> Execution:
        """Interpolate linearly between this execution (``share`` 0) and ``other`` (1), or extrapolate.

        If both executions have the same number of moments, each moment is interpolated, so a different moment can
        become the highest. Otherwise, only the highest moments and the end are interpolated.
        """

        def number_between(mine: int, theirs: int) -> int:
            return round(mine + (theirs - mine) * share)

        def rise_between(mine: Rise, theirs: Rise) -> Rise:
            return Rise(*map(number_between, mine, theirs))

        return replace(self, moments=tuple(map(rise_between, *_alike(self, other))))


class Visit(NamedTuple):
    """An execution, with the memory in use during the execution. Memory is counted in addition to the memory between
    two steps.

    Attributes:
        execution: execution of a part of the model.
        begin: memory at the start.
        highest: highest memory; see :class:`Execution`.
        highest_reduced: highest memory if complete gradients are freed.
        highest_moved: highest memory if each complete gradient is freed together with the earlier gradient of its
            parameter.
        end: memory at the end.
    """

    execution: Execution
    begin: Rise
    highest: Rise
    highest_reduced: Rise
    highest_moved: Rise
    end: Rise

    @classmethod
    def of(cls, execution: Execution, begin: Rise) -> Visit:
        """Return the visit of ``execution``, at whose start the memory ``begin`` is in use."""
        rises = (execution.highest, execution.highest_reduced, execution.highest_moved, execution.end)
        return cls(execution, begin, *map(begin.plus, rises))


@dataclass(frozen=True)
class Trace:
    """The recorded memory of one micro-batch; see [Note: traces and strategies].

    Attributes:
        batch_size: number of samples in the micro-batch.
        batch_bytes: size of the batch in bytes.
        executions: executions of the parts of the model, in the order in which they run.
        work: amount of computation, by phase and part of the model.
        saved_bytes: sizes of the tensors that the forward pass of each part saves for backward, in execution order.
    """

    batch_size: int
    batch_bytes: int
    executions: tuple[Execution, ...]
    work: Mapping[WorkKey, Work] = field(default_factory=dict)
    saved_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """Executions, with the memory in use during each execution."""
        return tuple(map(Visit.of, self.executions, self.levels))

    @cached_property
    def levels(self) -> list[Rise]:
        """Memory at the start of each execution and at the end of the last execution, in addition to the memory between
        two steps."""
        begin = Rise(activation=self.batch_bytes)
        return list(accumulate((each.end for each in self.executions), Rise.plus, initial=begin))

    def at(self, batch_size: int, other: Trace) -> Trace:
        """Return the trace for ``batch_size`` samples, interpolated or extrapolated linearly from this trace and
        ``other``.

        ``other`` must have a different number of samples. Bytes and work are assumed to be affine functions of the
        number of samples.
        """
        share = (batch_size - self.batch_size) / (other.batch_size - self.batch_size)
        return replace(self.between(other, share), batch_size=batch_size)

    def between(self, other: Trace, share: float) -> Trace:
        """Interpolate linearly between this trace (``share`` 0) and ``other`` (1), which has the same number of
        executions."""
        executions = [
            mine.between(theirs, share) for mine, theirs in zip(self.executions, other.executions, strict=True)
        ]
        batch_bytes = round(self.batch_bytes + (other.batch_bytes - self.batch_bytes) * share)
        work = {
            part: self.work.get(part, Work()) * (1 - share) + other.work.get(part, Work()) * share
            for part in {**self.work, **other.work}
        }
        saved_bytes = {
            place: tuple(
                round(mine + (theirs - mine) * share)
                for mine, theirs in zip(sizes, other.saved_bytes.get(place, sizes), strict=False)
            )
            for place, sizes in self.saved_bytes.items()
        }
        return Trace(self.batch_size, batch_bytes, tuple(executions), work, saved_bytes)

    @cached_property
    def without_gradients(self) -> Trace:
        """This trace without the memory of gradients."""
        executions = [
            replace(each, moments=tuple(moment._replace(gradient=0, pending=0) for moment in each.moments))
            for each in self.executions
        ]
        return replace(self, executions=tuple(executions))

    def is_like(self, other: Trace) -> bool:
        """Return whether both traces have the same executions."""
        mine, theirs = ([(each.phase, each.place) for each in trace.executions] for trace in (self, other))
        return mine == theirs

    def moved_bytes(self, places: Collection[str], min_bytes: int) -> dict[str, int]:
        """Return the number of bytes that the forward pass of each of ``places`` saves for backward, in execution
        order. Only tensors of at least ``min_bytes`` are counted."""
        order = dict.fromkeys(
            each.place for each in self.executions if each.phase == "forward" and each.place in places
        )
        return {place: sum(size for size in self.saved_bytes.get(place, ()) if size >= min_bytes) for place in order}


def moved_to_host(trace: Trace, blocks: Collection[str]) -> tuple[Trace, int]:
    """Return ``trace`` with only the memory that remains on the device, and the number of bytes outside the device at
    the end of a forward pass. See [Note: activations outside the device].

    Args:
        trace: trace with all activations on the device.
        blocks: names of the blocks whose activations are moved.
    """
    kept = trace.moved_bytes(blocks, MIN_BYTES)
    order = list(kept)
    away_at = {place: sum(kept[each] for each in order[: max(0, number - 1)]) for number, place in enumerate(order)}
    executions: list[Execution] = []
    away_bytes = 0
    for each in trace.executions:
        if each.place in away_at:
            change = Rise(activation=away_bytes - away_at[each.place])
            away_bytes = away_at[each.place]
            executions.append(replace(each, moments=tuple(map(change.plus, each.moments))))
        else:
            executions.append(each)
    return replace(trace, executions=tuple(executions)), sum(kept.values())


def _alike(mine: Execution, theirs: Execution) -> tuple[Sequence[Rise], Sequence[Rise]]:
    if len(mine.moments) == len(theirs.moments):
        return mine.moments, theirs.moments
    return [mine.highest, mine.highest_reduced, mine.end], [theirs.highest, theirs.highest_reduced, theirs.end]


def traced_plan(plan: Plan) -> Plan:
    """Return ``plan`` with only the settings that affect a trace. Plans that are equal in these settings share their
    trace, so a setting that is not reset here gets a trace of its own."""
    return replace(
        plan,
        parallel=ParallelPlan(accelerator="cpu"),
        batch=BatchPlan(),
        optimizer=OptimizerPlan(),
        offload=OffloadPlan(activations=plan.offload.activations),
        choice=ChoicePlan(),
    )


def take_trace(workload: Workload, plan: Plan, *, is_sharded: bool, like: str = "cpu") -> Trace:
    """Run one micro-batch of ``workload`` with the techniques of ``plan`` that act inside a forward pass, and return
    its trace.

    Args:
        workload: module and micro-batch.
        plan: plan from which only the techniques that act inside a forward pass are applied.
        is_sharded: True to trace the model as if it were sharded across ranks.
        like: kind of the device; see :func:`roomier.planner.fake.fake_world.fake_world`.

    Raises:
        RoomierError: ``build`` rejects the plan.
    """
    plan = traced_plan(plan)
    device = torch.device("cpu")
    precision = precision_of(plan.precision.mode, device)
    with fake_world(World(0, 1, 0, 0, 1), is_pairwise=True, like=like) as ranks:
        module = shapes_of(workload.module, precision.weight_dtype)
        engine, _ = build(plan, module, lambda _: Configured([]), EagerEngine, ranks)
        inner = _as_if_sharded(engine, precision.autocast_dtype) if is_sharded else []
        batch = shapes_of_batch(workload.batch)
        batch_bytes = sum(each.untyped_storage().nbytes() for each in tensors(batch))
        training_step, counter, batches = step_of(module, "training_step"), WorkCounter(), [batch]
        del batch
        with tracking(engine) as tracker, ExitStack() as stack:
            stack.enter_context(_reporting_complete_bytes(tracker, engine, inner, is_sharded=is_sharded))
            stack.enter_context(counter.counting(lambda: (tracker.phase, str(tracker.place))))
            tracker.enter("forward")
            engine.forward_backward(lambda batch, _: training_step(batch, 0), batches)
            executions, saved_bytes = tuple(_executions(tracker.moments())), tracker.saved_bytes()
        engine.close()
    return Trace(workload.batch_size, batch_bytes, executions, dict(counter.by_part), saved_bytes)


def _as_if_sharded(engine: EagerEngine, compute_dtype: torch.dtype | None) -> list[nn.Module]:
    """Convert weights to the dtype in which a sharded run would gather them, and remove views from the outputs of
    units.

    Returns:
        For each unit with two groups of parameters, the modules of the group whose weights are not used in matrix
        products.
    """
    network = engine.module
    units = units_of(network, engine.blocks)
    made = {each: each for each in root_parameters_of(units, compute_dtype)}
    inner: list[nn.Module] = []
    for unit in units:
        unit.register_forward_pre_hook(_pass_inputs, with_kwargs=True)
        for modules, dtype in parts_of(unit, compute_dtype):
            if modules != [unit]:
                inner += modules
            for module in modules:
                if not hasattr(module, "_roomier_part"):
                    module.register_forward_hook(without_views)
                for each in module.parameters():
                    if each not in made:  # the second group contains the weights of the first, which keep their dtype
                        made[each] = (
                            each
                            if dtype is None
                            else nn.Parameter(torch.empty_like(each, dtype=dtype), each.requires_grad)
                        )
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter in made:
                module._parameters[name] = made[parameter]
    return inner


class _Passed(torch.autograd.Function):
    """Operation through which ``fully_shard`` passes the inputs of a unit, to detect when the gradients of the inputs
    are complete.

    If a unit returns an input unchanged, this operation makes the output a view of the input.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _pass_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def passed(tensor: Tensor) -> Tensor:
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        return _Passed.apply(tensor)  # type: ignore[no-any-return,no-untyped-call]

    return map_tensors(passed, args), map_tensors(passed, kwargs)


class _Place(str):
    """Name of a part of the model, with values from the time at which this part was reported.

    Attributes:
        complete_bytes: total size of complete gradients in bytes.
        needs_inner: see :class:`Execution`.
    """

    __slots__ = ("complete_bytes", "needs_inner")
    complete_bytes: int
    needs_inner: bool

    def __new__(cls, name: str, complete_bytes: int, needs_inner: bool) -> _Place:
        made = super().__new__(cls, name)
        made.complete_bytes, made.needs_inner = complete_bytes, needs_inner
        return made


@contextmanager
def _reporting_complete_bytes(
    tracker: MemoryTracker, engine: EagerEngine, inner: Sequence[nn.Module], *, is_sharded: bool
) -> Iterator[None]:
    complete_bytes = 0

    def tell(name: str, needs_inner: bool = not inner) -> None:
        tracker.place = _Place(name, complete_bytes, needs_inner)

    def complete(parameter: Tensor) -> None:
        nonlocal complete_bytes
        assert parameter.grad is not None
        if is_sharded and parameter.grad.itemsize < 4:
            return
        complete_bytes += parameter.grad.untyped_storage().nbytes()
        tracker.place = _Place(tracker.place, complete_bytes, getattr(tracker.place, "needs_inner", True))

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for each in tensors(output):
            if each.requires_grad and torch.is_grad_enabled():
                each.register_hook(lambda gradient: tell(tracker.place, True))  # type: ignore[no-untyped-call]

    tell("")
    trained = [each for each in engine.module.parameters() if each.requires_grad]
    handles = [each.register_post_accumulate_grad_hook(complete) for each in trained]  # type: ignore[no-untyped-call]
    handles += [each.register_forward_hook(watch) for each in inner]
    try:
        with reporting_places(named_places(engine.module, engine.blocks), tell):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _executions(moments: Iterator[Snapshot]) -> Iterator[Execution]:
    begin = _rise(next(moments))
    phase = "forward"
    for (phase_now, place, needs_inner), group in groupby(moments, _whereabouts):
        phase = phase_now if phase == "forward" else phase  # phases after the backward pass count as backward
        levels = [_rise(each) for each in group]
        yield Execution(phase, place, tuple(each.minus(begin) for each in levels), needs_inner)
        begin = levels[-1]


def _whereabouts(moment: Snapshot) -> tuple[str, str, bool]:
    return moment.phase, str(moment.place), getattr(moment.place, "needs_inner", True)


def _rise(moment: Snapshot) -> Rise:
    num_bytes = moment.num_bytes
    return Rise(
        num_bytes[Kind.ACTIVATION],
        num_bytes[Kind.TEMPORARY] + num_bytes[Kind.GATHERED] + num_bytes[Kind.COMMUNICATION],
        num_bytes[Kind.GRADIENT],
        max(0, num_bytes[Kind.GRADIENT] - getattr(moment.place, "complete_bytes", 0)),
    )


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
    def at(counts: Sequence[int]) -> tuple[Trace, Shallow, list[tuple[int | None, list[Execution]]]]:
        shallow = shallow_copy(workload.module, repeats, counts)
        trace = take(replace(workload, module=shallow.module))
        return trace, shallow, shallow.visits(trace.executions)

    counts = [_NUM_TRACED] * len(repeats)
    trace, shallow, visits = at(counts)
    others = [executions for row, executions in visits if row is None]
    for number, repeat in enumerate(repeats):
        ends = [each.end for row, executions in visits if row == number for each in executions]
        # Some memory remains allocated after the row, for example autocast's copies of weights.
        if sum(each.activation for each in ends) or sum(each.temporary for each in ends):
            _, _, deeper = at([count + (number == row) for row, count in enumerate(counts)])
            more = [executions for row, executions in deeper if row is None]
            for mine, theirs in zip(others, more, strict=True):
                pairs = zip(mine, theirs, strict=True)
                mine[:] = [each.between(other, repeat.count - _NUM_TRACED) for each, other in pairs]
    return _written_out(trace, shallow, visits, repeats)


def _written_out(
    trace: Trace,
    shallow: Shallow,
    visits: Sequence[tuple[int | None, Sequence[Execution]]],
    repeats: Sequence[Repeat],
) -> Trace:
    """Return the trace of the full model, in which the visits to middle blocks are repeated."""
    represented = {
        place: [repeat.places(period)[index] for period in range(1, repeat.count - 1)]
        for repeat in repeats
        for index, place in enumerate(repeat.places(1))
    }

    def names(place: str) -> Sequence[str]:  # of the blocks that a block of the shallow model represents
        own = shallow.place_in_model(place)
        return represented.get(own, [own])

    executions: list[Execution] = []
    for row, visit in visits:
        if row is None:
            executions += visit
            continue
        times = range(repeats[row].count - 2)
        for time in times if visit[0].phase == "forward" else times[::-1]:
            executions += [replace(each, place=each.place and represented[each.place][time]) for each in visit]
    work = {(phase, name): each for (phase, place), each in trace.work.items() for name in names(place)}
    saved_bytes = {name: sizes for place, sizes in trace.saved_bytes.items() for name in names(place)}
    return replace(trace, executions=tuple(executions), work=work, saved_bytes=saved_bytes)
