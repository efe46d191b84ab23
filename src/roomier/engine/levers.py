"""The levers of the Plan that work inside a forward, put in place around a network. The order is the design."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roomier.activation.block_forward import Recompute
from roomier.activation.recompute import apply_recompute
from roomier.api.blocks import find_blocks
from roomier.attention.kernels import attention_context
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.wrapped_forward import unwrap
from roomier.engine.compile import compile_blocks, undo_compile
from roomier.loss.chunked import apply_chunked_loss
from roomier.plan import Plan
from roomier.precision.policy import Precision
from roomier.precision.sizes import size_warnings


@dataclass
class Levers:
    """What the engine asks of them at each step, and how they are taken away.

    Attributes:
        forward_context: what a step runs in.
        recompute: what blocks compute again; None where nothing is.
    """

    network: nn.Module
    forward_context: Callable[[], AbstractContextManager[Any]]
    recompute: Recompute | None = None

    def undo(self) -> None:
        """The network as it was; what was trained stays."""
        undo_compile(self.network)
        unwrap(self.network)


def apply_levers(plan: Plan, network: nn.Module, device: torch.device, precision: Precision, ranks: Ranks) -> Levers:
    """Put the levers of ``plan`` in place on ``network``, whose parameters are on ``device`` but not divided yet.

    Raises:
        RoomierError: the network has no blocks, or no output layer, that a lever needs.
    """
    levers = Levers(network, attention_context(plan.attention, precision.forward_context()))
    levers.undo()  # those of an engine before this one
    for warning in size_warnings(network, precision, device):
        notice(warning)
    blocks = find_blocks(network)
    try:
        if plan.loss.chunked:
            apply_chunked_loss(network, plan.loss.chunk_tokens)
        levers.recompute = apply_recompute(blocks, plan.activation, plan.offload, device, ranks)
        if plan.compile.enabled:
            compile_blocks(blocks)  # around what is computed again, so that the compiler sees it
    except BaseException:
        levers.undo()
        raise
    return levers
