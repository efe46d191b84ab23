"""Dry runs, which execute the ``build`` of a run and two steps of its engine, in a fake environment without memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from roomier.api.kept_weights import KeptWeights
from roomier.api.module import Module
from roomier.api.step_arguments import num_step_arguments
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.memory.kinds import Kind, total_bytes
from roomier.memory.tracker import MemoryTracker, Snapshot, tracking
from roomier.optim.averaging import WeightAverage, tensors_to_average
from roomier.plan import ActivationPlan, Plan
from roomier.planner.dry_runs.places import named_places, reporting_places
from roomier.planner.dry_runs.work import Part, Work, WorkCounter
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.shapes import shapes_of, shapes_of_batch
from roomier.planner.workload import Workload
from roomier.precision.policy import precision_of

NumBytes = dict[Kind, int]
OF_THE_BATCH = (Kind.ACTIVATION, Kind.TEMPORARY)
"""Kinds whose bytes can differ from a forecast if shapes depend on values or kernels allocate more than their
results."""
_NUM_STEPS = 1000  # length of the run, for schedules. It does not affect memory.


@dataclass(frozen=True)
class Stretch:
    """Part of a step during which one part of the model runs.

    Attributes:
        phase: ``"forward"``, ``"backward"`` or ``"update"``.
        place: name of the part of the model; empty between parts.
        begin: bytes by kind at the start.
        peak: bytes by kind at the moment when their total is highest.
        end: bytes by kind at the end.
    """

    phase: str
    place: str
    begin: NumBytes
    peak: NumBytes
    end: NumBytes

    @cached_property
    def peak_bytes(self) -> int:
        """Total bytes at the peak."""
        return total_bytes(self.peak)

    def with_activations(self, factor: float) -> Stretch:
        """Return this stretch with its activations and temporaries multiplied by ``factor``, because their sizes depend
        on the batch."""
        moments = (
            {kind: round(count * factor) if kind in OF_THE_BATCH else count for kind, count in moment.items()}
            for moment in (self.begin, self.peak, self.end)
        )
        return Stretch(self.phase, self.place, *moments)


@dataclass(frozen=True)
class DryRun:
    """One optimizer step of one rank, after the first step.

    Attributes:
        stretches: parts of the step in execution order.
        work: amount of computation, by phase and part of the model.
    """

    stretches: tuple[Stretch, ...]
    work: Mapping[Part, Work]

    @property
    def peak(self) -> Stretch:
        """Stretch with the highest total of tensor bytes."""
        return max(self.stretches, key=lambda each: each.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Highest total of tensor bytes."""
        return self.peak.peak_bytes


def dry_run(workload: Workload, plan: Plan, *, rank: int = 0, is_pairwise: bool = True, like: str = "cpu") -> DryRun:
    """Run a step of ``workload`` under ``plan`` without memory or a device.

    Only the shapes of the module are copied, and no values are computed. [Note: values in a dry run] describes code
    that reads values of tensors. :func:`within_budget` handles plans with an activation budget.

    Args:
        workload: module and micro-batch.
        plan: plan with a concrete strategy.
        rank: rank to simulate. Rank 0 requires at least as much memory as any other rank.
        is_pairwise: use the point-to-point collectives of gloo. False uses the collectives of NCCL.
        like: kind of the device whose kernels determine the saved memory; see
            :func:`roomier.planner.fake.fake_world.fake_world`.

    Raises:
        RoomierError: ``build`` rejects the plan, or shapes in the step depend on unknown values.
    """
    if plan.activation.policy == "budget":
        return within_budget(
            plan, lambda given: dry_run(workload, given, rank=rank, is_pairwise=is_pairwise, like=like)
        )
    plan = replace(plan, parallel=replace(plan.parallel, accelerator="cpu"))
    local_size = plan.parallel.devices
    world = World(rank, plan.parallel.num_ranks, rank % local_size, rank // local_size, local_size)
    device = torch.device("cpu")
    with fake_world(world, is_pairwise=is_pairwise, like=like) as ranks:
        module = shapes_of(workload.module, precision_of(plan.precision.mode, device).weight_dtype)
        engine, _ = build(
            plan, module, lambda blocks: configure(plan, module, lambda: _NUM_STEPS, blocks), EagerEngine, ranks
        )
        return _tracked_step(
            engine,
            module,
            _copies(engine, [each for each in workload.copies if each.is_on(like)]),
            lambda: _micro_batches(workload, plan, like),
            clips=plan.batch.gradient_clip_val,
            num_steps_before=2 if plan.parallel.strategy == "ddp" else 1,  # DDP is constructed in the second step
        )


def within_budget(plan: Plan, run: Callable[[Plan], DryRun]) -> DryRun:
    """Return the step of a ``plan`` with an activation budget, interpolated between full recomputation and no
    recomputation.

    Blocks select recomputation by measured times, so the actual step is between the step with full recomputation and
    the step without recomputation.

    The peak equals the budget. If the budget is outside the range of the two peaks, the peak equals the nearer of the
    two peaks. Activations are copied from the step without recomputation, and are limited to the highest level at which
    the peak is within the budget. Work is interpolated in proportion to the bytes.

    Args:
        plan: plan with the activation policy ``"budget"``.
        run: function that returns the step of a given plan without an activation budget.
    """
    wanted = plan.activation
    least = run(replace(plan, activation=ActivationPlan("full")))
    most = run(replace(plan, activation=ActivationPlan()))
    low, high = least.peak_bytes, most.peak_bytes
    budget_bytes = wanted.budget_bytes
    if budget_bytes is None:
        assert wanted.budget_fraction is not None
        budget_bytes = low + round(wanted.budget_fraction * max(high - low, 0))
    if budget_bytes >= high or high <= low:
        return most
    if budget_bytes <= low:
        return least
    moments = [moment for each in most.stretches for moment in (each.begin, each.peak, each.end)]
    over = ((moment, total_bytes(moment) - budget_bytes) for moment in moments)
    height = max(0, min(moment[Kind.ACTIVATION] - num_bytes for moment, num_bytes in over if num_bytes > 0))

    def held(moment: NumBytes) -> NumBytes:
        return {**moment, Kind.ACTIVATION: min(moment[Kind.ACTIVATION], height)}

    stretches = (
        replace(each, begin=held(each.begin), peak=held(each.peak), end=held(each.end)) for each in most.stretches
    )
    share = (budget_bytes - low) / (high - low)
    work = {
        part: least.work.get(part, Work()) * (1 - share) + most.work.get(part, Work()) * share
        for part in {**least.work, **most.work}
    }
    return DryRun(tuple(stretches), work)


def _micro_batches(workload: Workload, plan: Plan, like: str) -> Sequence[Any]:
    """Return the micro-batches of a step. The engine moves only one micro-batch at a time to a device with separate
    memory."""
    one_by_one = _OneByOne(lambda: shapes_of_batch(workload.batch), plan.batch.accumulate_grad_batches)
    return list(one_by_one) if like == "cpu" else one_by_one


class _OneByOne(Sequence[Any]):
    """Sequence of ``num`` items. Each access creates a new item, and the sequence retains no reference to the item."""

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
    """Return the tensors that callbacks retain from the start of a run, such as averages."""
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
    *,
    clips: float | None,
    num_steps_before: int,
) -> DryRun:
    takes_index = num_step_arguments(module, "training_step", 2) > 1
    places = named_places(engine.module, engine.blocks)
    counter = WorkCounter()
    at_hand: list[Any] = []  # batches that a loop still retains; the last batch is retained until the update ends
    engine.hooks.batch_start = lambda batch, _: at_hand.append(batch)
    engine.hooks.batch_end = lambda _: at_hand.clear()

    def training_step(batch: Any, _: int) -> Any:
        return module.training_step(batch, 0) if takes_index else module.training_step(batch)

    def step(tracker: MemoryTracker) -> None:
        tracker.enter("forward")
        batches = make_batches()
        engine.forward_backward(training_step, batches)
        tracker.place = ""
        tracker.enter("update")
        if clips is not None:
            engine.clip()
        engine.step()
        at_hand.clear()
        del batches  # loops hold them during the update
        tracker.enter("rest")

    with tracking(engine, copies) as tracker, ExitStack() as stack:

        def tell(place: str) -> None:
            tracker.place = place

        stack.enter_context(reporting_places(places, tell))
        for _ in range(num_steps_before):  # creates optimizer states, and identifies the kinds of storages
            step(tracker)
        tracker.restart()
        stack.enter_context(counter.counting(lambda: (tracker.phase, tracker.place)))
        step(tracker)
        moments = list(stretches_of(tracker.moments()))
    engine.close()
    return DryRun(tuple(moments), dict(counter.by_part))


def stretches_of(moments: Iterator[Snapshot]) -> Iterator[Stretch]:
    """Merge consecutive snapshots of a tracked step that have the same phase and place.

    The first snapshot of ``moments`` is the state before the step.
    """
    begin = dict(next(moments).num_bytes)
    for (phase, place), group in itertools.groupby(moments, lambda each: (each.phase, each.place)):
        peak, end = begin, begin
        for moment in group:
            end = moment.num_bytes
            if moment.total() > total_bytes(peak):
                peak = dict(end)
        yield Stretch(phase, place, begin, peak, dict(end))
        begin = dict(end)
