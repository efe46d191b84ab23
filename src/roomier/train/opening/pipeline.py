"""Stages of a pipeline, found before the model is built, and traces of its steps."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

<<<<<<< HEAD
from roomier.api.callback import Callback, KeepsWeights
=======
>>>>>>> a48a27b8 (Pipelines: strategy="auto" considers stages, with estimates from one trace on fake tensors)
from roomier.api.module import Module
from roomier.core.tree import leaves
from roomier.engine.facts import Facts, check_module
from roomier.plan import Plan
from roomier.planner.stages import find_stages, trace_of_step
from roomier.run.settled import Settled
from roomier.techniques.pipeline.pipeline import Pipeline
from roomier.techniques.pipeline.trace import Trace
from roomier.train.settling.checks import check_supports_stages
from roomier.train.settling.settle import alone
from roomier.train.step import transfer_to

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
            self._traces[key] = self._trace(name, batch)
        return self._traces[key]

    def _trace(self, name: str, batch: Any) -> Trace:
        with alone(self._module):
            return trace_of_step(self._module, name, batch, self._plan, self._blocks)


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


<<<<<<< HEAD
def _check_supported(settled: Settled, module: Module) -> None:
    """Check that no hook or callback requires the full model or the backward pass of the loss on each rank.

    Raises:
        RoomierError: a hook or a callback is not supported.
    """
    problem = "is not supported with stages, of which each rank has only one"
    for name in ("backward", "optimizer_step"):
        if overrides(module, name, Module):
            action = f"Remove {name}, or use pipeline_parallel_size=1"
            raise RoomierError(name, type(module).__name__, problem, action)
    for each in settled.callbacks:
        if isinstance(each, KeepsWeights):
            raise RoomierError("callbacks", type(each).__name__, problem, "Remove it, or use pipeline_parallel_size=1")
    if settled.plan.parallel.stages_per_rank > 1:
        _check_hooks_of_micro_batches(settled, module)


def _check_hooks_of_micro_batches(settled: Settled, module: Module) -> None:
    # The stages of a rank run a micro-batch at different times, and other micro-batches in between.
    problem = "is not supported with several stages per rank, which run parts of different micro-batches in turn"
    for name, owners in {"on_train_batch_start": [], "on_after_backward": settled.callbacks}.items():
        found = [each for each in owners if overrides(each, name, Callback)]
        if overrides(module, name, Module) or found:
            action = f"Remove {name}, or use stages_per_rank=1 and schedule='1f1b'"
            raise RoomierError(name, type(found[0] if found else module).__name__, problem, action)


=======
>>>>>>> a48a27b8 (Pipelines: strategy="auto" considers stages, with estimates from one trace on fake tensors)
def _find(settled: Settled, module: Module, facts: Facts) -> Pipeline:
    batch = settled.data.first_batch()
    with alone(module):
        transfer = transfer_to(torch.device("cpu"), module, settled.request.datamodule)
        if transfer is not None:
            batch = transfer(copy.deepcopy(batch))
        return find_stages(module, facts.blocks, batch, settled.plan)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return (leaf,) if isinstance(leaf, (int, type(None))) else (type(leaf),)
