"""Estimates of pipelines: a trace of the step on tensors without memory, and the step of one stage."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from roomier.api.module import Module, network_of
from roomier.api.overrides import overrides
from roomier.core.mesh import Mesh
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import DryRun
from roomier.planner.dry_runs.places import is_inside
from roomier.planner.fake.fake_world import fake_world
from roomier.planner.fake.shapes import shapes_of, shapes_of_batch
from roomier.planner.fake.user_code import reason_of
from roomier.planner.memory.kinds import MODEL_STATES, Interval, Kind
from roomier.planner.stages import GRADIENT_HOOKS, divided, with_logged
from roomier.planner.workload import Workload
from roomier.techniques.pipeline.pipeline import Pipeline
from roomier.techniques.pipeline.schedule import SCHEDULES
from roomier.techniques.pipeline.trace import Trace, trace_step
from roomier.techniques.pipeline.units import find_units
from roomier.techniques.precision.policy import precision_of


def traced_stages(workload: Workload, plan: Plan) -> tuple[Pipeline, Trace]:
    """Return the stages of the step under ``plan``, and its trace; see :func:`roomier.planner.stages.find_stages`.

    No tensor of the trace has memory. The workload stores the trace, because many plans are compared.

    Raises:
        RoomierError: the step cannot be divided into the stages of the plan.
    """
    network, known, mode = network_of(workload.module), workload.traces, plan.precision.mode
    key = (mode, workload.batch_size)
    if key not in known:
        precision = precision_of(mode, torch.device("cpu"))
        of_module = {each: name for name, each in network.named_modules()}
        with fake_world(Mesh(), is_pairwise=True), precision.forward_context()():
            module, batch = shapes_of(workload.module, precision.weight_dtype), shapes_of_batch(workload.batch)
            copied = network_of(module)
            units = find_units(copied, [copied.get_submodule(of_module[each]) for each in workload.blocks])
            given = precision.convert_batch(batch) if precision.weight_dtype else batch
            numbers = _host_generators()
            known[key] = trace_step(copied, units, with_logged(module, "training_step", given), nullcontext)
            if numbers != _host_generators():
                known[key].random.add("")
    return divided(network, workload.blocks, known[key], plan), known[key]


def reason_against_stages(workload: Workload, plan: Plan) -> str:
    """Return the reason why a run of ``plan`` with stages could differ from a run without them; empty if it could not.

    Random numbers outside of the layers are such a reason, because they can select the layers that a step calls.
    """
    module = workload.module
    for name in (*GRADIENT_HOOKS, "on_train_batch_end"):
        if overrides(module, name, Module):
            return f"{type(module).__name__}.{name} would receive the loss, gradients or outputs of one stage only"
    try:
        _, trace = traced_stages(workload.with_batch_size(1), plan)
    except Exception as error:  # user code can raise any exception
        return f"the trace of the step {reason_of(error)}"
    if "" in trace.random:
        return "the step draws random numbers outside of its layers, so steps may call different layers"
    if trace.random and plan.batch.seeding != "events":
        return f"stages change the random numbers of {min(trace.random)}, unless seeding='events' is set"
    return ""


def part_of_stage(
    whole: DryRun, pipeline: Pipeline, trace: Trace, num_micro_batches: int, stage: int, share_of_weights: float
) -> DryRun:
    """Return an estimate of the dry run of ``stage``.

    The model states are proportional to the weights of the stage. The activations are those of its layers, for as many
    micro-batches as are in flight. Operations outside of the layers, such as the loss, belong to the last stage.

    Args:
        whole: step of the full model, in the form of a dry run.
        pipeline: stages of the network.
        trace: trace of the step.
        num_micro_batches: number of micro-batches in a step.
        stage: number of the stage.
        share_of_weights: fraction of the weights that the stage stores.
    """
    own, names = pipeline.plan_of(trace, stage), [event.unit for event in trace.events]

    @cache
    def share_of(place: str) -> float:
        calls = [own.first <= number < own.last for number, name in enumerate(names) if is_inside(name, place)]
        return sum(calls) / len(calls) if calls else float(own.is_last)

    # The last micro-batch has the highest peak, because all gradients exist.
    starts = [number for number, (a, b) in enumerate(pairwise(whole.intervals)) if a.phase < b.phase == "forward"]
    last = [(b, a.end[Kind.ACTIVATION]) for a, b in pairwise(whole.intervals[max(starts, default=0) :])]
    saved = sum(
        share_of(each.place) * (each.end[Kind.ACTIVATION] - before) for each, before in last if each.phase == "forward"
    )
    actions = SCHEDULES[pipeline.schedule](stage, pipeline.num_stages, 1, num_micro_batches)
    num_in_flight = max(accumulate(1 if action.is_forward else -1 for action in actions))
    intervals = []
    for each, before in last:
        is_update = each.phase == "update"
        if not is_update and not share_of(each.place):
            continue
        scaled = [kind for kind in Kind if kind in MODEL_STATES or (is_update and kind is not Kind.ACTIVATION)]
        recomputed = max(0, each.peak[Kind.ACTIVATION] - before) if each.phase == "backward" else 0
        activation = {} if is_update else {Kind.ACTIVATION: int(last[0][1] + num_in_flight * saved + recomputed)}
        moments = [
            {**moment, **{kind: int(moment.get(kind, 0) * share_of_weights) for kind in scaled}, **activation}
            for moment in each.moments
        ]
        intervals.append(Interval(each.phase, each.place, *moments))
    shares = {key: 1.0 if key[0] == "update" else share_of(key[1]) for key in whole.work}
    return DryRun(tuple(intervals), {key: whole.work[key] * share for key, share in shares.items() if share})


def _host_generators() -> tuple[object, ...]:
    """Return the states of the generators of Python and NumPy."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2]
