"""Modules and optimizer steps that several benchmarks use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from roomier.api.module import Module
from roomier.core.log import quiet
from roomier.core.ranks import Ranks
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.facts import facts_of
from roomier.engine.optimizers import configure
from roomier.engine.staged import StagedEngine
from roomier.plan import Plan
from roomier.planner.context import find_context_region
from roomier.planner.memory.tracker import MemoryTracker, tracking
from roomier.planner.stages import find_stages
from roomier.train.opening.pipeline import StepTraces


class Trained(Module):
    """Module for a network that returns outputs and a loss.

    Args:
        network: the network. A batch contains its arguments.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        loss: Tensor = self.network(*batch)[1]
        return loss


def ignore(phase: str) -> None:
    """Do nothing at the start of a phase of a step."""


def engine_of(plan: Plan, module: Module, ranks: Ranks | None = None, batch: Any = None) -> EagerEngine:
    """Return the engine of ``plan`` for ``module``, without messages. A plan with a context size or with stages
    requires ``batch``."""
    with quiet():
        ranks, parallel = ranks or Ranks(), plan.parallel
        if parallel.num_peers > 1:
            ranks = ranks.arranged(parallel.mesh_on(ranks.world))
        facts = facts_of(plan, module, ranks)
        if parallel.context_parallel_size > 1:
            region, _ = find_context_region(module, batch, plan)
            facts = replace(facts, region=region)
        if parallel.pipeline_parallel_size > 1:
            facts = replace(facts, pipeline=find_stages(module, facts.blocks, batch, plan))
        kind = StagedEngine if facts.pipeline is not None else EagerEngine
        engine, _ = build(
            plan, module, lambda blocks: configure(plan, module, lambda: 1000.0, blocks), kind, ranks, facts=facts
        )
        if isinstance(engine, StagedEngine):
            engine.trace_of = StepTraces(module, facts, plan)
    return engine


class Steps:
    """Optimizer steps of a plan.

    Args:
        plan: the plan.
        module: the module, which the steps train.
        batches: micro-batches of each step.
        ranks: the ranks of the run. Default: one rank.
        num_warmup: number of steps to run immediately.
    """

    def __init__(
        self, plan: Plan, module: Module, batches: Sequence[Any], ranks: Ranks | None = None, num_warmup: int = 0
    ) -> None:
        self.engine = engine_of(plan, module, ranks, batches[0])
        self.module = module
        self._batches = batches
        self._num_ranks = 1 if ranks is None else ranks.world.size
        for _ in range(num_warmup):
            self.step()

    def step(self, enter: Callable[[str], None] = ignore) -> Tensor:
        """Run one step, call ``enter`` at the start of each phase, and return the mean loss of the samples of this
        rank."""
        enter("forward")
        loss = self.engine.forward_backward(self._loss_of, list(self._batches))
        enter("update")
        self.engine.step()
        assert loss is not None
        return loss * self._num_ranks

    def _loss_of(self, batch: Any, index: int) -> Tensor:
        loss = self.module.training_step(batch, 0)
        assert isinstance(loss, Tensor)
        return loss

    def tracked(self) -> AbstractContextManager[MemoryTracker]:
        """Track the memory of the steps in this context."""
        return tracking(self.engine)
