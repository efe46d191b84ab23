"""Stages of a pipeline, found before the model is built, and traces of its steps."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from roomier.api.module import Module
from roomier.core.tree import leaves
from roomier.engine.facts import Facts, check_module
from roomier.plan import Plan
from roomier.planner.stages import find_stages, trace_of_step
from roomier.run.settled import Settled
from roomier.techniques.pipeline.pipeline import Pipeline
from roomier.techniques.pipeline.trace import Trace
from roomier.train.settling.checks import check_supports_stages
from roomier.train.settling.planned import alone, on_host

_PIPELINE = "_roomier_pipeline"


class StepTraces:
    """Traces of the steps of a module, by step and by the shapes of the batch.

    A trace runs the step once, on a copy of the module without parameters in memory.

    Args:
        module: module that defines the steps.
        facts: properties of its network.
        plan: plan of the run.
    """

    def __init__(self, module: Module, facts: Facts, plan: Plan) -> None:
        self._module, self._plan = module, plan
        blocks = {*facts.blocks}  # a set, because torchmetrics replaces the operator == of its modules
        self._blocks = [name for name, each in facts.network.named_modules() if each in blocks]
        self._traces: dict[Hashable, Trace] = {}

    def __call__(self, name: str, batch: Any) -> Trace:
        """Return the trace of the step ``name``, such as ``"training_step"``, for ``batch``.

        Raises:
            TrainingError: stages cannot reproduce the step; see :func:`roomier.techniques.pipeline.trace.trace_step`.
        """
        trained = tuple(each.requires_grad for each in self._module.parameters())  # a callback can unfreeze parameters
        key = (name, torch.is_grad_enabled(), trained, *map(_kind, leaves(batch)))
        if key not in self._traces:
            with alone(self._module):
                self._traces[key] = trace_of_step(self._module, name, batch, self._plan, self._blocks)
        return self._traces[key]


def pipeline_of(settled: Settled, module: Module, facts: Facts) -> Pipeline | None:
    """Return the stages of the network in ``module``. Every rank must call this function.

    In a fit, rank 0 traces the training step with the first batch. Later calls use the stages of the first fit. Without
    an earlier fit, an evaluation runs the full network on each rank, and the result is None.

    Raises:
        RoomierError: the step cannot be divided into the stages of the plan.
    """
    network, plan = facts.network, settled.plan
    known: Pipeline | None = network.__dict__.get(_PIPELINE)
    if known is None and settled.request.is_fit:
        check_module(plan, module, network)
        check_supports_stages(plan, settled.callbacks, module)
        _ = settled.data.train_loader  # created on all ranks, because the constructor may use collectives
        known = network.__dict__[_PIPELINE] = settled.ranks.on_zero(lambda: _find(settled, module, facts))
    return known


def _find(settled: Settled, module: Module, facts: Facts) -> Pipeline:
    batch = settled.data.first_batch()
    with alone(module):
        return find_stages(module, facts.blocks, on_host(settled, module, batch), settled.plan)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return (leaf,) if isinstance(leaf, (int, type(None))) else (type(leaf),)
