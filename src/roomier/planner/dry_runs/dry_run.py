"""Dry runs, which execute ``build`` and two or three training steps on fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from roomier.api.callback import KeptWeights
from roomier.api.hooks import step_of
from roomier.api.module import Module
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.engine.staged import StagedEngine
from roomier.plan import OffloadPlan, Plan
from roomier.plan.choices import averages_itself
from roomier.planner.context import facts_with_region
from roomier.planner.dry_runs.budget_estimates import TYPICAL_DEVICE, DryEstimates
from roomier.planner.dry_runs.places import named_places, reporting_places
from roomier.planner.dry_runs.work import Work, WorkCounter, WorkKey
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.shapes import shapes_of, shapes_of_batch
from roomier.planner.hardware.machine import Device
from roomier.planner.memory.kinds import Interval, total_bytes
from roomier.planner.memory.predict import layout_of
from roomier.planner.memory.tracker import MemoryTracker, Snapshot, tracking
from roomier.planner.workload import Workload
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.budget import BudgetedRecompute
from roomier.techniques.optim.averaging import WeightAverage, tensors_to_average
from roomier.techniques.pipeline.pipeline import Pipeline
from roomier.techniques.pipeline.trace import Trace
from roomier.techniques.precision.policy import precision_of

_NUM_STEPS = 1000  # run length for schedules; it does not affect memory


@dataclass(frozen=True)
class DryRun:
    """One optimizer step of one rank, in the steady state after the first steps of the run.

    Attributes:
        intervals: intervals of the step in execution order.
        work: amount of computation, by phase and part of the model.
        keeps: activations that each block saves under an activation budget; empty if there is no budget.
    """

    intervals: tuple[Interval, ...]
    work: Mapping[WorkKey, Work]
    keeps: Mapping[str, Keep] = field(default_factory=dict)

    @property
    def peak(self) -> Interval:
        """Interval with the largest total size of tensors."""
        return max(self.intervals, key=lambda each: each.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Largest total size of tensors, in bytes."""
        return self.peak.peak_bytes


def dry_run(
    workload: Workload,
    plan: Plan,
    *,
    rank: int = 0,
    is_pairwise: bool = True,
    like: str = "cpu",
    device: Device = TYPICAL_DEVICE,
    stages: tuple[Pipeline, Trace] | None = None,
) -> DryRun:
    """Run a training step of ``workload`` under ``plan`` on fake tensors.

    Only the shapes of the module are copied, and no values are computed; for code that reads tensor values, see
    [Note: values in a dry run]. With an activation budget, the activations to save are selected after the second step,
    as in a run, and the third step is returned. All optimizer states and parameters are on the device.

    Args:
        workload: module and micro-batch.
        plan: plan with a concrete strategy.
        rank: rank to simulate. No rank requires more memory than rank 0.
        is_pairwise: True to simulate the pairwise sends of gloo ranks; False to simulate NCCL collectives.
        like: device type whose kernels determine which tensors are saved for backward; see
            :func:`roomier.planner.fake.fake_world.fake_world`.
        device: device whose speed determines the time of recomputation for an activation budget.
        stages: result of :func:`roomier.planner.formula.stages.traced_stages` for a plan with a pipeline.

    Raises:
        RoomierError: ``build`` rejects the plan, shapes in the step depend on unknown values, or an activation budget
            is too small.
    """
    cpu = torch.device("cpu")
    reads_gradients = layout_of(plan, cpu).reads_in_backward
    offload = OffloadPlan(activations=plan.offload.activations)
    plan = replace(plan, parallel=replace(plan.parallel, accelerator="cpu"), offload=offload)
    if averages_itself(plan.optimizer.name):  # the tracked step has all states
        plan = replace(plan, optimizer=replace(plan.optimizer, options={**plan.optimizer.options, "freeze_step": 1}))
    local_size = plan.parallel.devices
    world = World(rank, plan.parallel.num_ranks, rank % local_size, rank // local_size, local_size)
    # If the device has separate memory, the engine moves one micro-batch at a time to it.
    micro_batches = _OneByOne(lambda: shapes_of_batch(workload.batch), plan.batch.accumulate_grad_batches)
    with fake_world(plan.parallel.mesh_on(world), is_pairwise=is_pairwise, like=like) as ranks:
        module = shapes_of(workload.module, precision_of(plan.precision.mode, cpu).weight_dtype)
        facts = facts_with_region(plan, module, workload.batch, ranks)
        kind: type[EagerEngine] = EagerEngine
        if stages is not None:
            facts, kind = replace(facts, pipeline=stages[0]), StagedEngine
        optimizers = partial(configure, plan, module, lambda: _NUM_STEPS)
        engine, _ = build(plan, module, optimizers, kind, ranks, facts=facts)
        if isinstance(engine, StagedEngine) and stages is not None:
            trace = stages[1]
            engine.trace_of = lambda *_: trace
        if reads_gradients:  # reductions then complete before the backward pass continues
            for each in engine.module.parameters():
                if each.requires_grad:
                    each.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
        return _tracked_step(
            engine,
            module,
            _copies(engine, [each for each in workload.copies if each.is_on(like)]),
            lambda: list(micro_batches) if like == "cpu" else micro_batches,
            plan,
            device,
            like,
        )


class _OneByOne(Sequence[Any]):
    """Sequence of ``num`` items that creates a new item at each access and holds no reference to it."""

    def __init__(self, make: Callable[[], Any], num: int) -> None:
        self._make = make
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._num:
            raise IndexError(index)
        return self._make()


def _copies(engine: EagerEngine, copies: Sequence[KeptWeights]) -> list[Tensor]:
    """Return the tensors that callbacks hold from the start of a run, such as averaged weights."""
    saved = engine.weights() if any(each.with_buffers for each in copies) else {}
    buffers = [(name, each) for name, each in engine.module.named_buffers() if name in saved]
    averages = [
        WeightAverage(tensors_to_average(engine.module.named_parameters(), buffers if each.with_buffers else ()))
        for each in copies
    ]
    return [tensor for average in averages for tensor in average.averages.values()]


def _tracked_step(
    engine: EagerEngine,
    module: Module,
    copies: Sequence[Tensor],
    make_batches: Callable[[], Sequence[Any]],
    plan: Plan,
    device: Device,
    like: str,
) -> DryRun:
    # DDP is constructed in the second step. A run with an activation budget measures its second step.
    wraps_later = plan.parallel.strategy == "ddp" and plan.parallel.pipeline_parallel_size == 1
    num_steps_before = 2 if wraps_later or plan.activation.policy == "budget" else 1
    own_step = step_of(module, "training_step")
    places = named_places(engine.module, engine.blocks)
    counter = WorkCounter()
    at_hand: list[Any] = []  # batches that a training loop still references; the last one until the update ends
    engine.hooks.batch_start = lambda batch, _: at_hand.append(batch)
    engine.hooks.batch_end = lambda _: at_hand.clear()

    def training_step(batch: Any, _: int) -> Any:
        return own_step(batch, 0)

    def step(tracker: MemoryTracker) -> None:
        tracker.enter("forward")
        batches = make_batches()
        engine.forward_backward(training_step, batches)
        tracker.place = ""
        tracker.enter("update")
        if plan.batch.gradient_clip_val is not None:
            engine.clip()
        engine.step()
        at_hand.clear()
        del batches  # a training loop references the batches until the update ends
        tracker.enter("rest")

    with tracking(engine, copies) as tracker, ExitStack() as stack:

        def tell(place: str) -> None:
            tracker.place = place

        stack.enter_context(reporting_places(places, tell))
        counting = counter.counting(lambda: (tracker.phase, tracker.place))
        recompute = engine.levers.recompute
        budgeted = recompute if isinstance(recompute, BudgetedRecompute) else None
        if budgeted is not None:
            stack.enter_context(counting)
            names = [places[block.module] for block in budgeted.blocks]
            budgeted.estimates = DryEstimates(tracker, counter.by_part, names, plan, device, like)
        for _ in range(num_steps_before):  # creates optimizer states, and identifies the kinds of storages
            counter.by_part.clear()
            step(tracker)
        if budgeted is None:
            stack.enter_context(counting)
        else:
            budgeted.begin_step(engine.optimizers, [])  # selects activations before the tracker is restarted
        tracker.restart()
        counter.by_part.clear()
        step(tracker)
        moments = tuple(intervals_of(tracker.moments()))
    work = dict(counter.by_part)
    engine.close()
    keeps = {} if budgeted is None else {places[each.module]: each.keep for each in budgeted.blocks}
    return DryRun(moments, work, {place: keep for place, keep in keeps.items() if ("backward", place) in work})


def intervals_of(moments: Iterator[Snapshot]) -> Iterator[Interval]:
    """Merge consecutive snapshots of a tracked step that have the same phase and place into intervals.

    The first snapshot of ``moments`` is the state before the step.
    """
    begin = dict(next(moments).num_bytes)
    for (phase, place), group in itertools.groupby(moments, lambda each: (each.phase, each.place)):
        peak, end = begin, begin
        for moment in group:
            end = moment.num_bytes
            if moment.total() > total_bytes(peak):
                peak = dict(end)
        yield Interval(phase, place, begin, peak, dict(end))
        begin = dict(end)
