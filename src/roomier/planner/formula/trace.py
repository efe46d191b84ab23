"""Traces: the memory of the forward and backward pass in addition to the model states, recorded once for all
strategies.

[Note: traces and strategies]
A trace is recorded by running one micro-batch in a fake environment, with the techniques of the plan that affect the
forward pass, but without an optimizer. Each :class:`Execution` contains the growth of memory since its start. Model
states are not recorded, because their sizes are calculated for each strategy and added to this growth. Only two effects
in a forward pass depend on sharding: if weights of matmuls are all-gathered in 16 bits, autocast creates no copies of
them and their gradients have 16 bits; and a view that a unit returns becomes a separate tensor. Sharded models
therefore have their own trace.

[Note: pending gradients]
A gradient is *complete* when it has been added to the gradient of its parameter, and *pending* until then. DDP copies a
complete gradient into a bucket and frees the original, and later micro-batches add to the existing gradient. In sharded
models, 16-bit gradients remain pending until the end of the unit's backward pass, when they are added to the 32-bit
gradients.

[Note: activations outside the device]
A dry run does not distinguish device and host memory, so both are calculated from a trace; see
[Note: two blocks at a time] in :mod:`roomier.techniques.activation.copies`. During the forward or backward pass of a
block, the device contains the activations of this block and the previous block, whereas the host or the disk contains
the activations of all blocks. Tensors smaller than ``MIN_BYTES`` remain on the device.
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
from roomier.api.module import Module
from roomier.core.errors import PlanError
from roomier.core.mesh import Mesh
from roomier.core.tree import map_tensors, tensors
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.plan import BatchPlan, ChoicePlan, OffloadPlan, OptimizerPlan, ParallelPlan, Plan
from roomier.planner.context import facts_with_region
from roomier.planner.dry_runs.places import named_places, reporting_places
from roomier.planner.dry_runs.repeats import Repeat, find_repeats, report_full_trace, step_in_full
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
        activation: batches, and tensors that the forward pass saves for backward.
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
    """One forward or backward pass of a part of the model, with the growth of memory during this pass.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        place: name of the part; empty between parts.
        moments: growth since the start of the execution, after each change. The last element is the growth at the end.
        needs_inner: in a backward pass, whether the norms and embeddings of the part are required from this execution
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
        """Return the moment with the highest sum, in which gradients and pending gradients have the given weights."""
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

    def grown(self, more: Execution, less: Execution, times: float) -> Execution:
        """Return this execution plus ``times`` times the difference between ``more`` and ``less``.

        If all executions have the same number of moments, each moment is computed, so a different moment can become the
        highest. If not, the result contains only the highest moments and the end.
        """

        def rise(own: Rise, one: Rise, other: Rise) -> Rise:
            return Rise(*(round(a + (b - c) * times) for a, b, c in zip(own, one, other, strict=True)))

        return replace(self, moments=tuple(map(rise, *_alike(self, more, less))))


class Visit(NamedTuple):
    """An execution with the memory in use during it, in addition to the memory between two steps.

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
        """Return a visit of ``execution`` that starts with the memory ``begin`` in use."""
        rises = (execution.highest, execution.highest_reduced, execution.highest_moved, execution.end)
        return cls(execution, begin, *map(begin.plus, rises))


@dataclass(frozen=True, eq=False)
class Trace:
    """The recorded memory of one micro-batch; see [Note: traces and strategies].

    Attributes:
        batch_size: number of samples in the micro-batch.
        batch_bytes: size of the batch in bytes.
        executions: executions of the parts of the model, in execution order.
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
            mine.grown(theirs, mine, share) for mine, theirs in zip(self.executions, other.executions, strict=True)
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
    """Return ``trace`` with only the memory on the device, and the number of offloaded bytes at the end of a forward
    pass. See [Note: activations outside the device].

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


def _alike(*executions: Execution) -> list[Sequence[Rise]]:
    if len({len(each.moments) for each in executions}) == 1:
        return [each.moments for each in executions]
    return [[each.highest, each.highest_reduced, each.end] for each in executions]


def traced_plan(plan: Plan) -> Plan:
    """Return ``plan`` with only the settings that affect a trace, which is the key of cached traces. All other settings
    are reset to their defaults."""
    given, parallel, batch = plan.parallel, ParallelPlan(accelerator="cpu"), BatchPlan()
    if (size := given.context_parallel_size) > 1:
        parallel, batch = ParallelPlan("ddp", "cpu", given.devices, given.num_nodes, size), BatchPlan(seeding="events")
    return replace(
        plan,
        parallel=parallel,
        batch=batch,
        optimizer=OptimizerPlan(),
        offload=OffloadPlan(activations=plan.offload.activations),
        choice=ChoicePlan(),
    )


def take_trace(workload: Workload, plan: Plan, *, is_sharded: bool, like: str = "cpu") -> Trace:
    """Run one micro-batch of ``workload`` with the techniques of ``plan`` that affect the forward pass, and return its
    trace.

    Args:
        workload: module and micro-batch.
        plan: plan whose techniques are applied if they affect the forward pass.
        is_sharded: True to trace the model as if it were sharded across ranks.
        like: kind of the device; see :func:`roomier.planner.fake.fake_world.fake_world`.

    Raises:
        RoomierError: ``build`` rejects the plan.
    """
    plan = traced_plan(plan)
    device = torch.device("cpu")
    precision, size = precision_of(plan.precision.mode, device), plan.parallel.context_parallel_size
    mesh = Mesh(World(0, size, 0, 0, size), context=size)
    with fake_world(mesh, is_pairwise=True, like=like) as ranks:
        module = shapes_of(workload.module, precision.weight_dtype)
        facts = facts_with_region(plan, module, workload.batch, ranks)
        whole = replace(plan, parallel=ParallelPlan(accelerator="cpu"))
        engine, _ = build(whole, module, lambda _: Configured([]), EagerEngine, ranks, facts=facts)
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
    """Convert weights to the dtype in which a sharded run all-gathers them, and remove views from the outputs of units.

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
                    if each not in made:  # weights in both groups keep the dtype of the first
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
    """Operation that ``fully_shard`` applies to the inputs of a unit to detect when their gradients are complete.

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
    """Name of a part of the model, with values at the time when it was reported.

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
    with ExitStack() as stack:
        for handle in (*handles, reporting_places(named_places(engine.module, engine.blocks), tell)):
            stack.enter_context(handle)
        yield


def _executions(moments: Iterator[Snapshot]) -> Iterator[Execution]:
    begin = _rise(next(moments))
    phase = "forward"
    for (phase_now, place, needs_inner), group in groupby(moments, _whereabouts):
        phase = phase_now if phase == "forward" else phase  # later phases count as backward
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


_LEAST = 5  # minimum number of periods of a row for which copies of the model are traced


def take_deep_trace(workload: Workload, plan: Plan, *, is_sharded: bool, like: str = "cpu") -> Trace:
    """Return the same result as :func:`roomier.planner.formula.trace.take_trace`, but trace only a few blocks of a deep
    model.

    If a model contains a row of equal blocks, copies with two or three periods of them are traced; see [Note: depth] in
    :mod:`roomier.planner.dry_runs.repeats`.

    Args:
        workload: module and micro-batch.
        plan: plan whose techniques are applied if they affect the forward pass.
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
        except Exception as error:  # removing blocks can make a model raise any exception
            report_full_trace(workload.module, repeats, error)
    return take_trace(workload, plan, is_sharded=is_sharded, like=like)


def _from_shallow_copies(workload: Workload, repeats: Sequence[Repeat], take: Callable[[Workload], Trace]) -> Trace:
    taken: list[Trace] = []

    def run(module: Module) -> tuple[Sequence[Execution], Mapping[WorkKey, Work]]:
        taken.append(take(replace(workload, module=module)))
        return taken[-1].executions, taken[-1].work

    step = step_in_full(workload.module, repeats, run, num_ends=1, affects_others=_leave_memory)
    first = taken[0]
    saved_bytes = {name: sizes for place, sizes in first.saved_bytes.items() for name in step.names(place)}
    return replace(first, executions=tuple(step.parts), work=step.work, saved_bytes=saved_bytes)


def _leave_memory(visits: Sequence[Execution]) -> bool:
    """Return whether memory is still allocated after ``visits``, for example autocast's copies of weights."""
    ends = [each.end for each in visits]
    return any((sum(each.activation for each in ends), sum(each.temporary for each in ends)))
