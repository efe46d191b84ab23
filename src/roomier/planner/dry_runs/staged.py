"""Forecast of a pipeline: a dry run of each stage, and a simulation of the schedule."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from roomier.api.module import network_of
from roomier.core.mesh import STAGE
from roomier.core.units import format_bytes
from roomier.core.world import World
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import DryRun, dry_run
from roomier.planner.forecast import Forecast, StepTime
from roomier.planner.formula.estimate import Estimator
from roomier.planner.formula.stages import part_of_stage, traced_stages
from roomier.planner.hardware.machine import Machine
from roomier.planner.memory.weights import Unit, units_with_weights
from roomier.planner.workload import Workload
from roomier.techniques.pipeline.pipeline import Pipeline
from roomier.techniques.pipeline.schedule import SCHEDULES
from roomier.techniques.pipeline.trace import Trace
from roomier.techniques.precision.policy import precision_of


def forecast_of_stages(
    workload: Workload, plan: Plan, machine: Machine, estimator: Estimator, *, is_estimate: bool = False
) -> Forecast:
    """Return the forecast of ``plan``, which has a pipeline, for the rank that requires the most memory.

    Args:
        workload: workload whose ``batch_size`` is the micro-batch size.
        plan: plan with a concrete strategy.
        machine: machine for which the forecast is computed.
        estimator: converts a dry run to a forecast.
        is_estimate: if True, divide the closed form of the full model among the stages, which is faster than dry runs
            of all stages. Requires one stage per rank.

    Raises:
        RoomierError: the step cannot be divided into stages, or ``build`` rejects the plan.
    """
    parallel = plan.parallel
    factor = workload.batch_size if is_estimate else 1  # one trace is sufficient for the estimates of all batch sizes
    pipeline, trace = stages = traced_stages(workload.with_batch_size(1) if is_estimate else workload, plan)
    num_micro_batches, num_ranks = plan.batch.accumulate_grad_batches, parallel.num_ranks // pipeline.num_ranks
    own = replace(parallel, pipeline_parallel_size=1, schedule=None, stages_per_rank=1, split="")
    own = replace(own, devices=num_ranks, num_nodes=1)
    if own.devices > machine.devices_per_node:
        own = replace(own, devices=machine.devices_per_node, num_nodes=own.devices // machine.devices_per_node)
    single = replace(plan, parallel=replace(own, strategy="single", devices=1, num_nodes=1))
    alone = replace(plan, parallel=own) if own.num_ranks > 1 else single
    weights, units = _units_of_stages(workload, plan, pipeline)
    if is_estimate:
        # Stages reduce gradients without DDP's buckets.
        whole = estimator.run(single if own.strategy == "ddp" else alone, workload.batch_size)
        part = partial(part_of_stage, whole, pipeline, trace, num_micro_batches)
        runs = [part(stage, _num_bytes(each) / _num_bytes(weights)) for stage, each in enumerate(units)]
    else:
        runs = _runs_of_stages(workload, plan, machine, stages)
    found = [estimator.of_dry_run(alone, run, workload.batch_size, own) for run, own in zip(runs, units, strict=True)]
    passes_s = [_passes_s(estimator, alone, *each) for each in zip(runs, found, units, strict=True)]
    link = machine.in_node if parallel.num_nodes == 1 else machine.between_nodes
    message_s = [link.latency_s + factor * each / link.bytes_per_s for each in _sent_bytes(pipeline, trace)]
    total_s = played_s(pipeline.schedule, num_micro_batches, passes_s, message_s, pipeline.stages_per_rank)
    times = [each.time for each in found if each.time is not None]
    slowest = max(times, key=lambda each: each.compute_s)
    time = StepTime(
        compute_s=slowest.compute_s,
        recompute_s=slowest.recompute_s,
        communication_s=max(each.communication_s for each in times),
        exposed_s=max(each.communication_s for each in times),  # gradients are reduced after the last backward pass
        update_s=max(each.update_s for each in times),
        bubble_s=total_s - slowest.compute_s,
    )
    peaks = ", ".join(format_bytes(each.peak_bytes) for each in found)
    what = "stage" if pipeline.stages_per_rank == 1 else "rank"
    remark = f"The {what}s need {peaks}, and the slowest {what} waits for {time.bubble_s / time.total_s:.0%} of a step."
    worst = max(found, key=lambda each: each.peak_bytes)
    method = "closed form" if is_estimate else "dry run"
    return replace(worst, plan=plan, method=method, time=time, remark=f"{remark} {worst.remark}".strip())


def _runs_of_stages(workload: Workload, plan: Plan, machine: Machine, stages: tuple[Pipeline, Trace]) -> list[DryRun]:
    """Return a dry run of each rank of a pipeline, the rank of the first stage first."""
    parallel, kind = plan.parallel, machine.device.kind
    ranks = parallel.mesh_on(World(0, parallel.num_ranks)).along(STAGE)[::-1]
    num_micro_batches = num_run = plan.batch.accumulate_grad_batches
    if stages[0].schedule != "gpipe" and kind != "cpu":  # on a CPU, all micro-batches are in memory
        num_run = min(num_run, 2 * len(ranks))  # later micro-batches need no more memory
    shorter = replace(plan, batch=replace(plan.batch, accumulate_grad_batches=num_run))
    found = []
    for rank in ranks:
        options: dict[str, Any] = {"is_pairwise": kind == "cpu", "like": kind, "device": machine.device}
        run = dry_run(workload, shorter, rank=rank, stages=stages, **options)
        found.append(replace(run, work={key: each * (num_micro_batches / num_run) for key, each in run.work.items()}))
    return found


def played_s(
    schedule: str,
    num_micro_batches: int,
    passes_s: Sequence[tuple[float, float]],
    message_s: Sequence[float],
    stages_per_rank: int = 1,
) -> float:
    """Return the duration of all passes of a step in seconds, as executed by
    :class:`roomier.engine.staged.StagedEngine`.

    Args:
        schedule: name of the schedule.
        num_micro_batches: number of micro-batches in the step.
        passes_s: for each rank of a pipeline, the durations of the forward and of the backward pass of one micro-batch,
            which are divided equally among its stages.
        message_s: for each boundary between two stages, the time in which a message arrives.
        stages_per_rank: number of stages of each rank.
    """
    num_ranks, last = len(passes_s), len(passes_s) * stages_per_rank - 1
    queues = [
        deque(SCHEDULES[schedule](rank, num_ranks, stages_per_rank, num_micro_batches)) for rank in range(num_ranks)
    ]
    free_s = [0.0] * num_ranks
    done_s: dict[tuple[bool, int, int], float] = {}
    while any(queues):
        for rank, queue in enumerate(queues):
            forward_s, backward_s = (each / stages_per_rank for each in passes_s[rank])
            while queue:
                action, stage = queue[0], queue[0].stage
                sender = stage - 1 if action.is_forward else stage + 1
                key, arrives_s = (action.is_forward, sender, action.index), 0.0
                if 0 <= sender <= last:
                    if key not in done_s:
                        break
                    arrives_s = done_s[key] + message_s[min(sender, stage)]
                duration_s = forward_s if action.is_forward else backward_s
                if stage == last:  # it runs the backward pass directly after the forward pass
                    duration_s = forward_s + backward_s if action.is_forward else 0.0
                free_s[rank] = max(free_s[rank], arrives_s) + duration_s
                done_s[action.is_forward, stage, action.index] = free_s[rank]
                queue.popleft()
    return max(free_s)


def _passes_s(
    estimator: Estimator, plan: Plan, run: DryRun, forecast: Forecast, units: Sequence[Unit]
) -> tuple[float, float]:
    """Return the durations of the forward and of the backward pass of one micro-batch."""
    forward = DryRun(run.intervals, {key: each for key, each in run.work.items() if key[0] == "forward"})
    num_micro_batches = plan.batch.accumulate_grad_batches
    of_forward = estimator.of_dry_run(plan, forward, forecast.micro_batch, units).time
    assert of_forward is not None
    assert forecast.time is not None
    forward_s = of_forward.compute_s / num_micro_batches
    return forward_s, forecast.time.compute_s / num_micro_batches - forward_s


def _units_of_stages(workload: Workload, plan: Plan, pipeline: Pipeline) -> tuple[list[Unit], list[list[Unit]]]:
    """Return the units of the network, and for each rank of a pipeline, these units with only the weights that it
    stores."""
    network, precision = network_of(workload.module), precision_of(plan.precision.mode, torch.device("cpu"))
    owners = pipeline.owners(network, workload.blocks)
    units = units_with_weights(network, workload.blocks, precision.autocast_dtype, precision.weight_dtype)

    def part(unit: Unit, rank: int) -> Unit:
        return replace(unit, weights=tuple(each for each in unit.weights if rank in owners[each.name]))

    return units, [[part(each, rank) for each in units] for rank in range(pipeline.num_ranks)]


def _num_bytes(units: Sequence[Unit]) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for unit in units for each in unit.weights)


def _sent_bytes(pipeline: Pipeline, trace: Trace) -> list[int]:
    """Return the number of bytes that each stage but the last sends for one micro-batch."""
    plans = [pipeline.plan_of(trace, stage) for stage in range(pipeline.num_stages - 1)]
    return [sum(trace.spec(value).num_bytes for value in each.sent) for each in plans]
