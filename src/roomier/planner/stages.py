"""Search for the stages of a pipeline, before the model is built, by a trace of the training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from roomier.api.hooks import step_of
from roomier.api.module import Module, network_of
from roomier.engine.materialise import initialise_buffers
from roomier.plan import Plan
from roomier.planner.fake.shapes import copied_module
from roomier.techniques.pipeline.pipeline import Pipeline, find_pipeline
from roomier.techniques.pipeline.trace import Trace, parameters_without_values, trace_step
from roomier.techniques.pipeline.units import find_units
from roomier.techniques.precision.policy import precision_of

GRADIENT_HOOKS = (
    "backward",
    "optimizer_step",
    "configure_gradient_clipping",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Hooks that read the loss or the gradients of a step, of which a stage has only its own."""

_CPU = torch.device("cpu")


def trace_of_step(module: Module, name: str, batch: Any, plan: Plan, blocks: Collection[str]) -> Trace:
    """Return the trace of the step ``name`` of ``module``, such as ``"training_step"``, for ``batch``.

    The step runs once, on a copy of the module without parameters in memory.

    Args:
        blocks: names of the blocks of the network.

    Raises:
        TrainingError: stages cannot reproduce the step; see :func:`roomier.techniques.pipeline.trace.trace_step`.
    """
    with precision_of(plan.precision.mode, _CPU).forward_context()():
        copied = copied_module(module, dict(parameters_without_values(module)))
        if hasattr(vars(copied).get(name), "__wrapped__"):  # a profiler, which measures the original module
            del vars(copied)[name]
        network = network_of(copied)
        initialise_buffers(network)  # glue reads their values
        units = find_units(network, [network.get_submodule(each) for each in blocks])
        return trace_step(network, units, with_logged(copied, name, copy.deepcopy(batch)))


def with_logged(module: Module, name: str, batch: Any) -> Callable[[], Any]:
    """Return a function that runs the step ``name`` of ``module``, a copy, and returns its result and all values that
    it logs, because stages must compute both."""
    step, logged = step_of(module, name), list[Any]()

    def log(*args: Any, **kwargs: Any) -> None:
        logged.append((args, kwargs))

    for part in module.modules():
        if "log" in vars(part):
            vars(part).update(log=log, log_dict=log)
    return lambda: (step(batch, 0), logged)


def find_stages(module: Module, blocks: Sequence[nn.Module], batch: Any, plan: Plan) -> Pipeline:
    """Return the stages of ``module`` under ``plan``, by a trace of the training step for ``batch``.

    Args:
        blocks: the blocks of the network in ``module``.

    Raises:
        RoomierError: the step cannot be divided into the stages of the plan.
    """
    network = network_of(module)
    of_module = {each: name for name, each in network.named_modules()}
    batch = precision_of(plan.precision.mode, _CPU).convert_batch(batch)
    trace = trace_of_step(module, "training_step", batch, plan, [of_module[each] for each in blocks])
    return divided(network, blocks, trace, plan)


def divided(network: nn.Module, blocks: Sequence[nn.Module], trace: Trace, plan: Plan) -> Pipeline:
    """Return the stages of ``network`` under ``plan``; see :func:`find_stages`."""
    parallel = plan.parallel
    split = [each for each in parallel.split.split(",") if each]
    num_stages, per_rank = parallel.num_stages, parallel.stages_per_rank
    return find_pipeline(network, blocks, trace, num_stages, parallel.schedule_of_stages, split, per_rank)
