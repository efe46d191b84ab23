"""Checks of a module and a Plan before any technique is applied."""

from __future__ import annotations

import itertools

from torch import nn
from torch.nn.parameter import is_lazy

from roomier.api.module import Module
from roomier.core.errors import PlanError, RoomierError
from roomier.plan import Plan


def check_module(plan: Plan, module: Module, network: nn.Module) -> None:
    """Check that an engine can be built for ``module``.

    Raises:
        RoomierError: a layer is lazy, the loss reduction is unknown, or manual optimization is combined with a memory
            budget.
    """
    for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
        if is_lazy(tensor):
            action = "Run the model on one batch before fit to initialize the shapes of its lazy layers"
            raise RoomierError("model", name, "is lazy and has no shape yet", action)
    if module.loss_reduction not in ("mean", "sum"):
        problem = "is not a reduction of the loss over the terms of a micro-batch"
        raise RoomierError("loss_reduction", module.loss_reduction, problem, "Use 'mean' or 'sum'")
    if plan.activation.policy == "budget" and not module.automatic_optimization:
        problem = "is not supported with manual optimization, because the budget is allocated by measuring a step"
        action = "Use activation_checkpointing='full', 'every_n' or 'selective', or use automatic optimization"
        raise PlanError("activation.policy", "budget", problem, action)
