"""Creates the object that determines when the optimizers step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from roomier.core import torch_fake
from roomier.core.errors import PlanError
from roomier.engine.facts import Facts
from roomier.engine.offload import offloaded_updates
from roomier.engine.parallel import Parallel
from roomier.engine.step_in_backward import FIELD, StepInBackward
from roomier.engine.updates import Updates
from roomier.plan import Plan

if TYPE_CHECKING:
    from roomier.techniques.offload.residency import Residency


def updates_of(
    plan: Plan, facts: Facts, optimizers: Sequence[Optimizer], parallel: Parallel, residency: Residency | None
) -> Updates:
    """Return the object that determines when the optimizers step and where the optimizer states are stored.

    Args:
        residency: the offloaded parameters; None if no parameters are offloaded.

    Raises:
        PlanError: ``plan`` requests updates that manual optimization or one of the optimizers does not support.
        TierError: the tier of the optimizer states cannot be created.
    """
    has_states = plan.offload.optimizer_states != "none" and bool(optimizers) and not torch_fake.makes_fake_tensors()
    if has_states or residency is not None:
        return offloaded_updates(plan, facts, optimizers, parallel, residency)
    way = plan.optimizer.step_in_backward
    if way == "none" or not optimizers:
        return Updates(parallel)
    if facts.is_manual:
        problem = "is not supported with manual optimization, in which training_step steps the optimizers"
        raise PlanError(FIELD, way, problem, "Set step_in_backward=False, or use automatic optimization")
    return StepInBackward(
        facts.network,
        optimizers,
        facts.blocks,
        way=way,
        batch_plan=plan.batch,
        parallel=parallel,
    )
