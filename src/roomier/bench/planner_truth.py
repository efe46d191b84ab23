"""Measurement of the peak of a step: the same step as in a dry run, with real tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from roomier.api.adapt import as_module
from roomier.api.module import Module
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.core.tree import map_tensors
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.plan import Plan
from roomier.planner.memory.tracker import MemoryTracker, Snapshot, tracking


def measured_peak(module: nn.Module, batch: Any, plan: Plan, ranks: Ranks | None = None) -> Snapshot:
    """Return the memory at the peak of a step of ``plan`` on a CPU. The step follows one to four warm-up steps.

    Args:
        module: the model. The function trains a copy.
        batch: one micro-batch.
        plan: the plan. The accelerator of the plan is replaced by the CPU.
        ranks: the ranks of the run. Default: one rank.
    """
    tracker = measured_step(module, batch, plan, ranks)
    return tracker.peak()


def measured_step(
    module: nn.Module, batch: Any, plan: Plan, ranks: Ranks | None = None, accelerator: str = "cpu"
) -> MemoryTracker:
    """Run the step of :func:`measured_peak` on ``accelerator`` and return the tracker."""
    plan = replace(plan, parallel=replace(plan.parallel, accelerator=accelerator))
    copied = copy.deepcopy(as_module(module))
    _disable_logging(copied)

    num_batches = plan.batch.accumulate_grad_batches
    num_untracked = 2 if plan.activation.policy == "budget" else 0  # with a budget, the second step is timed
    num_steps_before = 2 if plan.parallel.strategy == "ddp" else 1  # DDP is created after the first step
    num_steps = num_untracked + num_steps_before + 1
    windows = [[map_tensors(torch.clone, batch) for _ in range(num_batches)] for _ in range(num_steps)]

    def step(enter: Callable[[str], None]) -> None:
        enter("forward")
        batches = windows.pop()  # kept alive during the update, as in a training loop
        engine.forward_backward(lambda each, _: copied.training_step(each, 0), batches)
        enter("update")
        if plan.batch.gradient_clip_val is not None:
            engine.clip()
        engine.step()
        del batches
        enter("rest")

    with quiet():
        engine, _ = build(
            plan, copied, lambda blocks: configure(plan, copied, lambda: 1000, blocks), EagerEngine, ranks or Ranks()
        )
        if (scaling := engine.scaler.state()) is not None:  # the initial scale is so large that steps would be skipped
            engine.scaler.load({**scaling, "scale": 1.0})
        for _ in range(num_untracked):
            step(lambda phase: None)
        with tracking(engine) as tracker:
            for _ in range(num_steps_before):
                step(tracker.enter)
            tracker.restart()
            step(tracker.enter)
        engine.close()
    return tracker


def _disable_logging(module: Module) -> None:
    for part in module.modules():
        if isinstance(part, Module):
            for name in ("log", "log_dict"):
                part.__dict__[name] = lambda *args, **kwargs: None
