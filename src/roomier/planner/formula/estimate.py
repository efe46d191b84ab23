"""Closed-form forecasts, which take milliseconds each, so that thousands of plans can be compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.api.callback import KeptSnapshots
from roomier.api.module import network_of
from roomier.core import torch_fake
from roomier.core.mesh import Mesh
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.plan import (
    ActivationPlan,
    AttentionPlan,
    BatchPlan,
    ChoicePlan,
    LossPlan,
    OffloadPlan,
    ParallelPlan,
    Plan,
)
from roomier.plan.choices import averages_itself
from roomier.plan.levers import LEVERS, without
from roomier.plan.parts import PARTS
from roomier.planner.dry_runs.dry_run import DryRun
from roomier.planner.dry_runs.within_budget import UNIFORM, NotNestedError, remark_of, within_budget
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.shapes import shapes_of
from roomier.planner.forecast import Forecast, Traffic
from roomier.planner.formula.closed_form import States, UnitOrder, timeline
from roomier.planner.formula.fixed_bytes import compiler_bytes, fixed_bytes
from roomier.planner.formula.offloaded import Group, Offloaded, offloaded
from roomier.planner.formula.trace import Trace, moved_to_host, take_deep_trace, traced_plan
from roomier.planner.hardware.machine import Machine
from roomier.planner.memory.kinds import Interval, Kind, added, total_bytes
from roomier.planner.memory.model_states import StateBytes, copied_bytes, kept_bytes
from roomier.planner.memory.predict import groups_of_weights, layout_of, state_bytes_of
from roomier.planner.memory.tracker import MemoryTracker
from roomier.planner.memory.walk import Layout, gradient_bytes, own_shape, unit_bytes
from roomier.planner.memory.weights import Unit, Weight, buffer_bytes, units_with_weights
from roomier.planner.timing.step_time import step_time
from roomier.planner.workload import Workload
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.copies import MIN_BYTES
from roomier.techniques.offload.regions import large_modules
from roomier.techniques.optim.adafactor import Adafactor
from roomier.techniques.optim.adamw import BlockwiseAdamW
from roomier.techniques.optim.averaging import tensors_to_average
from roomier.techniques.optim.muon import Muon
from roomier.techniques.parallel.shard import closed_blocks, root_parameters_of, units_of
from roomier.techniques.precision.policy import precision_of

_NUM_STEPS = 1000  # run length for schedules; it does not affect memory
_CPU = torch.device("cpu")
_OF_FORWARD = ("activation", "offload", "loss", "attention")  # without the tiers of model states in `offload`
_INTERPOLATED = (
    "The forecast for the activation budget is interpolated between full recomputation and no recomputation."
)


@dataclass(frozen=True)
class _Built:
    """The model on one device, after the changes that a plan makes to it before training."""

    units: list[Unit]
    buffer_bytes: int
    saved_buffer_bytes: int  # bytes of the saved floating-point buffers, in float32 or wider
    optimizers: list[Optimizer]
    names: dict[str, Any]
    # The keys are "whole", "sharded" and "regions". Each value lists modules with the names of their weights.
    groups: dict[str, list[tuple[str, list[str]]]]


@dataclass(frozen=True)
class _StepRun:
    """One optimizer step.

    Attributes:
        trace: trace of one micro-batch; None for a dry run. If the activations to save were selected for a budget, the
            trace is of a step in which all blocks save all activations.
        run: the step, in the form of a dry run.
        moved_bytes: total size in bytes of the offloaded activations.
        remark: see :class:`roomier.planner.forecast.Forecast`.
    """

    trace: Trace | None
    run: DryRun
    moved_bytes: int
    remark: str


class Estimator:
    """Source of closed-form forecasts for one workload on one machine; see :mod:`roomier.planner.formula.closed_form`.

    Most of the time is spent in traces, which are recorded on demand and cached: one for each combination of memory
    techniques that affect the forward pass, and a second one if another micro-batch size is required.

    Args:
        workload: workload with any batch size.
        machine: machine that the forecasts are for.
    """

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self._workload = workload
        self._machine = machine
        self._traces: dict[Hashable, dict[int, Trace]] = {}
        self._built = cache(partial(_build_on_one, workload))
        self._states: dict[Hashable, States] = {}
        self._orders: dict[tuple[int, int], UnitOrder] = {}
        network = network_of(workload.module)
        blocks = set(workload.blocks)
        self._blocks = frozenset(name for name, module in network.named_modules() if module in blocks)
        self._moved = cache(partial(moved_to_host, blocks=self._blocks))
        self._blended = cache(Trace.between)
        self._sized = cache(lambda size: workload if size == workload.batch_size else workload.with_batch_size(size))

    def estimate(self, plan: Plan, micro_batch: int) -> Forecast:
        """Return the forecast of ``plan`` with ``micro_batch`` samples on each rank.

        With an activation budget, the activations to save are selected in the same way as in a run; see
        [Note: a step within a budget]. The selection cannot be computed if blocks also offload activations, or if the
        backward passes of the blocks do not run in the reverse order of their forward passes. The peak is then assumed
        to equal the budget, but to be between the peaks with and without full recomputation, and ``remark`` contains a
        note.

        Raises:
            RoomierError: ``build`` rejects the plan, or an activation budget is too small.
        """
        layout = self._layout(plan)
        states = self._states_of(plan, layout)
        step = self._step(plan, layout, states, micro_batch)
        return self._forecast(plan, micro_batch, step, states)

    def run(self, plan: Plan, micro_batch: int) -> DryRun:
        """Return the step on which :meth:`estimate` bases its forecast, in the form of a dry run."""
        layout = self._layout(plan)
        return self._step(plan, layout, self._states_of(plan, layout), micro_batch).run

    def of_dry_run(self, plan: Plan, run: DryRun, micro_batch: int, units: Sequence[Unit] | None = None) -> Forecast:
        """Return the forecast of ``plan`` from a dry run. The plan may offload optimizer states, but no other tensors.

        Args:
            plan: plan of the dry run.
            run: dry run of ``plan`` with all optimizer states on the device.
            micro_batch: number of samples per micro-batch on each rank.
            units: units of the network that this rank trains; None means all units.
        """
        if plan.offload.optimizer_states == "none":
            return self._forecast(plan, micro_batch, _StepRun(None, run, 0, remark_of(run.keeps)), None, units)
        states = self._states_of(plan, self._layout(plan))
        less = {kind: -num_bytes for kind, num_bytes in states.away.kept_less.items()}
        intervals = [each.plus(less, less, less) for each in run.intervals]
        if not states.away.on_cpu:  # units are updated sequentially
            intervals = [
                replace(each, peak=added(each.begin, states.update)) if each.phase == "update" else each
                for each in intervals
            ]
        step = _StepRun(None, DryRun(states.away.on_device(intervals), run.work), 0, "")
        return self._forecast(plan, micro_batch, step, states)

    def _forecast(
        self,
        plan: Plan,
        micro_batch: int,
        step: _StepRun,
        states: States | None,
        units: Sequence[Unit] | None = None,
    ) -> Forecast:
        away = Offloaded() if states is None else states.away
        moves = plan.offload.activations != "none"
        intervals, moved_bytes = step.run.intervals, step.moved_bytes
        is_on_disk = plan.offload.activations == "disk"
        host_bytes = away.host_bytes + (0 if is_on_disk else moved_bytes)
        snapshot_bytes = 0
        if any(isinstance(each, KeptSnapshots) for each in self._workload.copies):
            # Two snapshots, each also on another node, and the copy from which a snapshot is written.
            num_copies = 1 + 2 * min(plan.parallel.num_nodes, 2)
            stored = added(intervals[-1].end, away.kept_less)
            snapshot_bytes = num_copies * total_bytes(stored, (Kind.PARAMETER, Kind.OPTIMIZER_STATE))
            if not self._layout(plan).is_sharded:  # one rank writes the states for all ranks
                snapshot_bytes //= self._machine.devices_per_node
        each_way = moved_bytes * plan.batch.accumulate_grad_batches if is_on_disk else 0
        return Forecast(
            plan=plan,
            machine=self._machine,
            micro_batch=micro_batch,
            method="dry run" if step.trace is None else "closed form",
            timeline=intervals,
            fixed_bytes=fixed_bytes(plan, self._machine, max(each.peak_bytes for each in intervals)),
            host_bytes=host_bytes + snapshot_bytes + compiler_bytes(plan, self._workload.num_parameters),
            time=step_time(
                self._sized(micro_batch),
                plan,
                self._machine,
                step.run.work,
                units=units if states is None else states.units,
                kept_bytes=step.trace.moved_bytes(self._blocks, MIN_BYTES) if step.trace and moves else None,
                away=away,
                chosen=None if step.remark == _INTERPOLATED else step.run.keeps,
            ),
            pinned_bytes=host_bytes if self._machine.device.has_own_memory else 0,
            disk_bytes=away.disk_bytes + (moved_bytes if is_on_disk else 0),
            traffic=away.traffic + Traffic(disk_read_bytes=each_way, disk_written_bytes=each_way),
            remark=step.remark,
        )

    def _layout(self, plan: Plan) -> Layout:
        on_cpu = self._machine.device.kind == "cpu"
        return replace(layout_of(plan, _CPU), on_gloo=on_cpu, holds_all_batches=on_cpu)

    def _step(self, plan: Plan, layout: Layout, states: States, micro_batch: int) -> _StepRun:
        moved_bytes, remark = 0, ""
        if plan.activation.policy != "budget":
            trace, moved_bytes = self._trace_on_device(plan, layout, micro_batch)
        else:
            if plan.offload.activations == "none":
                with suppress(NotNestedError):
                    return self._chosen_step(plan, layout, states, micro_batch)
            trace, remark = self._interpolated(plan, layout, micro_batch), _INTERPOLATED
        return _StepRun(trace, self._run(trace, plan, layout, states), moved_bytes, remark)

    def _run(self, trace: Trace, plan: Plan, layout: Layout, states: States) -> DryRun:
        num_micro_batches = plan.batch.accumulate_grad_batches
        work = {part: each * num_micro_batches for part, each in trace.work.items()}
        return DryRun(self._timeline(trace, states, layout), work)

    def _chosen_step(self, plan: Plan, layout: Layout, states: States, micro_batch: int) -> _StepRun:
        plans = {keep: replace(plan, activation=activation) for keep, activation in UNIFORM.items()}
        traces = {keep: self._trace_of(each, layout, micro_batch) for keep, each in plans.items()}
        runs = {keep: self._run(trace, plan, layout, states) for keep, trace in traces.items()}
        found = within_budget(plan, runs, self._blocks, self._machine.device)
        return _StepRun(traces[Keep.ALL], found, 0, remark_of(found.keeps))

    def _interpolated(self, plan: Plan, layout: Layout, micro_batch: int) -> Trace:
        wanted = plan.activation
        least, _ = self._trace_on_device(replace(plan, activation=ActivationPlan("full")), layout, micro_batch)
        most, _ = self._trace_on_device(replace(plan, activation=ActivationPlan()), layout, micro_batch)
        share = wanted.budget_fraction
        if share is None:
            assert wanted.budget_bytes is not None
            states = self._states_of(plan, layout)
            low, high = (
                max(each.peak_bytes for each in self._timeline(trace, states, layout)) for trace in (least, most)
            )
            share = (wanted.budget_bytes - low) / (high - low) if high > low else 1.0
        if share >= 1:
            return most
        return least if share <= 0 or not least.is_like(most) else self._blended(least, most, share)

    def _trace_on_device(self, plan: Plan, layout: Layout, micro_batch: int) -> tuple[Trace, int]:
        if not leave_device(plan, self._machine):
            return self._trace_of(plan, layout, micro_batch), 0
        whole = self._trace_of(
            replace(plan, offload=replace(plan.offload, activations="none", folder=None)), layout, micro_batch
        )
        return self._moved(whole)

    def _timeline(self, trace: Trace, states: States, layout: Layout) -> tuple[Interval, ...]:
        if states.away.parameters:  # the gradients of a unit are offloaded in the backward pass
            layout = replace(layout, steps_in_backward=True)
        if not layout.is_sharded:
            trace = trace.without_gradients if states.away.parameters else trace
            return states.away.on_device(timeline(trace, states, layout))
        key = (id(trace), id(states.units))  # both objects live as long as this cache
        if key not in self._orders:
            self._orders[key] = UnitOrder(trace, states.units)
        return states.away.on_device(timeline(trace, states, layout, self._orders[key]))

    def _trace_of(self, plan: Plan, layout: Layout, micro_batch: int) -> Trace:
        # Autocast creates no copies of parameters that are in a lower tier.
        has_autocast = precision_of(plan.precision.mode, _CPU).autocast_dtype is not None
        has_no_casts = layout.is_sharded or (plan.offload.parameters != "none" and has_autocast)
        plan = traced_plan(plan)
        known = self._traces.setdefault((plan, has_no_casts), {})
        if micro_batch not in known:
            known[micro_batch] = self._on_a_line(known, micro_batch) or take_deep_trace(
                self._sized(micro_batch), plan, is_sharded=has_no_casts, like=self._machine.device.kind
            )
        return known[micro_batch]

    @staticmethod
    def _on_a_line(known: dict[int, Trace], micro_batch: int) -> Trace | None:
        # With one sample, some operations avoid a copy that they need for several samples.
        taken = [each for size, each in known.items() if size > 1]
        if micro_batch == 1 or len(taken) < 2 or not taken[0].is_like(taken[1]):
            return None
        return taken[0].at(micro_batch, taken[1])

    def _states_of(self, plan: Plan, layout: Layout) -> States:
        # Settings of the forward pass do not affect the model states.
        sections = (getattr(plan, section) for section in PARTS if section not in _OF_FORWARD)
        key = (*sections, replace(plan.offload, activations="none"), layout)
        if key not in self._states:
            self._states[key] = self._make_states(plan, layout)
        return self._states[key]

    def _make_states(self, plan: Plan, layout: Layout) -> States:
        built = self._built_of(plan)
        sizes = state_bytes_of(plan, built.names)
        is_offloaded = plan.offload.optimizer_states != "none"
        at_once = torch_fake.updates_together(self._machine.device.kind) and not is_offloaded
        with fake_world(Mesh(), is_pairwise=True, like=self._machine.device.kind):
            update = {} if layout.steps_in_backward else update_bytes(built.optimizers, layout, at_once=at_once)
            away = self._offloaded(plan, built, layout, sizes)
        kept = kept_bytes(built.units, layout, sizes, built.buffer_bytes)
        for kind, num_bytes in away.kept_less.items():
            kept[kind] -= num_bytes
        for each in self._workload.copies:
            if each.is_on(self._machine.device.kind):
                kept[Kind.PARAMETER] += copied_bytes(built.units, layout)
                kept[Kind.PARAMETER] += built.saved_buffer_bytes if each.with_buffers else 0
        return States(
            units=built.units,
            sizes=[unit_bytes(each, layout) for each in built.units],
            kept=kept,
            gradient_bytes=sum(gradient_bytes(each.weights) for each in built.units),
            update=update,
            away=away,
        )

    def _offloaded(self, plan: Plan, built: _Built, layout: Layout, sizes: StateBytes) -> Offloaded:
        on_cpu = self._machine.device.kind == "cpu"
        if plan.offload.optimizer_states == plan.offload.parameters == "none":
            return Offloaded(on_cpu=on_cpu)
        weights = {each.name: each for unit in built.units for each in unit.weights}
        known: dict[Hashable, list[int]] = {}

        def tensors_of(weight: Weight, own: tuple[int, ...]) -> list[int]:
            if weight.name not in built.names:  # no optimizer updates it
                return []
            optimizer, group = built.names[weight.name]
            key = (id(group), own, weight.dtype)
            if key not in known:
                known[key] = state_tensors(optimizer, group, (own, weight.dtype))
            return known[key]

        has_regions = plan.offload.parameters != "none"
        key = "regions" if has_regions and not layout.is_sharded else "sharded" if layout.is_sharded else "whole"
        groups: list[Group] = [(place, [weights[name] for name in names]) for place, names in built.groups[key]]
        if has_regions and layout.is_sharded:
            inside = [(unit.name, unit.weights) for unit in built.units if not unit.is_root]
            groups = [("", [each for unit in built.units if unit.is_root for each in unit.weights]), *inside]
        dtype = None if layout.is_sharded else precision_of(plan.precision.mode, _CPU).autocast_dtype
        return offloaded(plan, groups, layout, sizes, tensors_of, on_cpu=on_cpu, cast_dtype=dtype)

    def _built_of(self, plan: Plan) -> _Built:
        strategy = "ddp" if averages_itself(plan.optimizer.name) else "single"
        alone = replace(
            without(plan, [lever for lever in LEVERS if lever.frees_gradients]),
            parallel=ParallelPlan(strategy, accelerator="cpu"),
            batch=BatchPlan(),
            activation=ActivationPlan(),
            offload=OffloadPlan(),
            loss=LossPlan(),
            attention=AttentionPlan(),
            choice=ChoicePlan(),
        )
        return self._built(alone)


def leave_device(plan: Plan, machine: Machine) -> bool:
    """Return whether ``plan`` moves activations out of device memory. On a CPU, this applies only to offloading to
    disk, because device memory is host memory."""
    tier = plan.offload.activations
    return tier == "disk" or (tier == "cpu" and machine.device.kind != "cpu")


def _build_on_one(workload: Workload, alone: Plan) -> _Built:
    precision = precision_of(alone.precision.mode, _CPU)
    with fake_world(Mesh(), is_pairwise=True) as ranks:
        module = shapes_of(workload.module, precision.weight_dtype)
        engine, _ = build(
            alone, module, lambda blocks: configure(alone, module, lambda: _NUM_STEPS, blocks), EagerEngine, ranks
        )
        network = engine.module
        updated_by = groups_of_weights(network, engine.optimizers)
        units = units_of(network, engine.blocks)
        apart = root_parameters_of(units, precision.autocast_dtype) | {
            each for each in network.parameters() if not each.dim()
        }
        saved = engine.weights()
        averaged = tensors_to_average((), ((name, each) for name, each in network.named_buffers() if name in saved))
        engine.close()
        return _Built(
            units_with_weights(network, engine.blocks, precision.autocast_dtype, precision.weight_dtype),
            buffer_bytes(network),
            sum(each.numel() * max(each.itemsize, 4) for each in averaged.values()),
            engine.optimizers,
            updated_by,
            {
                "whole": _groups(network, closed_blocks(network, engine.blocks), set(), updated_by),
                "sharded": _groups(network, units, apart, updated_by),
                "regions": _groups(network, large_modules(network, engine.blocks), set(), updated_by),
            },
        )


def _groups(
    network: nn.Module, modules: Sequence[nn.Module], apart: Collection[Tensor], updated: Collection[str]
) -> list[tuple[str, list[str]]]:
    """Return one group of weight names for each module, without the weights in ``apart``, preceded by a group that
    contains all other weights. Weights are in the order of their updates."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    of_modules = {module: name for name, module in network.named_modules()}
    found: list[tuple[str, list[str]]] = []
    for module in modules:
        own = [names.pop(each) for each in module.parameters() if each in names and each not in apart]
        found.append((of_modules[module], own))
    rest = set(names.values())
    outside = [*(name for name in updated if name in rest), *(name for name in names.values() if name not in updated)]
    return [("", outside), *found]


_SET_ELSEWHERE = ("params", "foreach", "capturable", "holds")


Key = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of this rank's shard of a weight."""


def update_bytes(optimizers: Sequence[Optimizer], layout: Layout, *, at_once: bool) -> dict[Kind, int]:
    """Return the peak of the temporary bytes during an update.

    Call this function inside :func:`~roomier.planner.fake.fake_world.fake_world`. Each optimizer runs a step on a few
    weights with the shapes of a rank's shards; see :func:`few_alike`. If the update is a ``foreach`` implementation,
    the sizes for all weights are summed.

    Args:
        optimizers: optimizers of the unsharded model.
        layout: how the weights are sharded.
        at_once: whether torch uses ``foreach`` implementations by default, as for unsharded weights on a GPU.
    """
    peak_bytes = 0
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind is torch.optim.Adafactor and layout.is_sharded:
            kind = Adafactor
        for group in optimizer.param_groups:
            is_whole = isinstance(optimizer, Muon) and bool(group.get("is_hidden"))
            shapes = [(tuple(weight.shape), weight.dtype) for weight in group["params"]]
            keys = [(shape if is_whole else own_shape(shape, layout), dtype) for shape, dtype in shapes]
            keys = [(shape, dtype) for shape, dtype in keys if math.prod(shape)]
            if at_once and "foreach" in group and not group.get("fused") and not layout.is_sharded:
                needed = sum(_bytes_of(optimizer, group, [key], kind) * count for key, count in Counter(keys).items())
            else:
                needed = _bytes_of(optimizer, group, few_alike(keys), kind)
            peak_bytes = max(peak_bytes, needed)
    return {Kind.TEMPORARY: peak_bytes}


def few_alike(keys: Sequence[Key]) -> list[Key]:
    """Return a short sequence that contains the same consecutive pairs as ``keys``.

    Consecutive pairs matter because temporary tensors of one weight can exist until the update of the next.
    """
    known: set[tuple[Key, Key]] = set()
    found = list(keys[:1])
    for pair in pairwise(keys):
        if pair not in known:
            found += pair if found[-1] != pair[0] else pair[1:]
            known.add(pair)
    return found


def _bytes_of(optimizer: Optimizer, group: Mapping[str, Any], keys: Sequence[Key], kind: type[Optimizer]) -> int:
    if not keys:
        return 0
    holder, made = _stepped(optimizer, group, keys, kind)
    with MemoryTracker(holder, [made], torch.device("cpu")) as tracker:
        tracker.restart()
        made.step()
        moments = [each.total() for each in tracker.moments()]
    return max(moments) - moments[0]


def state_tensors(optimizer: Optimizer, group: Mapping[str, Any], key: Key) -> list[int]:
    """Return the size in bytes of each state of a weight, except states that are scalars.

    Call this function inside :func:`~roomier.planner.fake.fake_world.fake_world`.
    """
    if not math.prod(key[0]):
        return []
    _, made = _stepped(optimizer, group, [key], type(optimizer))
    [states] = made.state.values()
    return [each.numel() * each.itemsize for each in states.values() if isinstance(each, Tensor) and each.dim() > 0]


def _stepped(
    optimizer: Optimizer, group: Mapping[str, Any], keys: Sequence[Key], kind: type[Optimizer]
) -> tuple[nn.ParameterList, Optimizer]:
    """Return weights with the shapes and dtypes in ``keys``, and an optimizer that has updated them, with the class
    ``kind`` and the settings of ``optimizer``."""
    holder = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in keys)
    weights = list(holder.parameters())
    known = {key: value for key, value in group.items() if key not in _SET_ELSEWHERE}
    arguments = cast(Any, kind).__init__.__code__.co_varnames
    options = {key: each for key, each in optimizer.defaults.items() if key in arguments and key not in _SET_ELSEWHERE}
    made: Optimizer = cast(Any, kind)([{"params": weights, **known}], **options)
    if isinstance(made, BlockwiseAdamW) and isinstance(optimizer, BlockwiseAdamW):
        made.update_as(optimizer)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    made.step()
    return holder, made
