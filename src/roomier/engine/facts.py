"""The facts of a network: the properties that all techniques of a Plan use."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from roomier.api.blocks import find_blocks
from roomier.api.module import Module, network_of
from roomier.core.device.capability import usable_device
from roomier.core.errors import PlanError, RoomierError
from roomier.core.ranks import Ranks
from roomier.plan import Plan
from roomier.techniques.context.region import SequenceRegion
from roomier.techniques.pipeline.pipeline import Pipeline
from roomier.techniques.precision.policy import Precision, precision_of

OWNERS = "_roomier_owners"
"""Attribute of a network that a pipeline divided: the numbers of the stages that store each tensor, by name."""


@dataclass(frozen=True)
class Facts:
    """Properties of a network, determined once by :func:`facts_of` and passed to every technique.

    Attributes:
        network: the module whose parameters are trained and saved.
        blocks: blocks of the network (see :func:`roomier.api.blocks.find_blocks`); empty if no layer repeats.
        device: the device of this rank.
        precision: the dtypes of weights and computation.
        ranks: the ranks that train the network together.
        is_manual: whether the module runs backward and update in its ``training_step`` (manual optimization).
        region: the blocks that run on slices of the sequence; None if each rank has its own sequences.
        is_staged: whether an earlier run left only the parameters of one stage of a pipeline in the network.
        pipeline: the stages of the network; None if each rank runs the full network.
    """

    network: nn.Module
    blocks: tuple[nn.Module, ...]
    device: torch.device
    precision: Precision
    ranks: Ranks
    is_manual: bool = False
    region: SequenceRegion | None = None
    is_staged: bool = False
    pipeline: Pipeline | None = None


def facts_of(plan: Plan, module: Module, ranks: Ranks) -> Facts:
    """Return the facts of the network in ``module`` under ``plan``.

    Techniques replace parameters and ``forward`` methods of the network, but its blocks remain the same modules.

    Raises:
        RoomierError: the device is not available, the device does not support the precision of the plan, or
            ``model_blocks()`` returns a module that is not part of the network.
    """
    device = usable_device(plan.parallel.accelerator, plan.precision.mode)
    precision = precision_of(plan.precision.mode, device)
    network = network_of(module)
    is_manual = not module.automatic_optimization
    is_staged = OWNERS in network.__dict__
    return Facts(network, tuple(find_blocks(network)), device, precision, ranks, is_manual, is_staged=is_staged)


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
