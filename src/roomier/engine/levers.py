"""The levers of the Plan that work inside a forward, put in place around a network. The order is the design."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from roomier.activation.block_forward import Recompute
from roomier.activation.recompute import apply_recompute
from roomier.api.blocks import find_blocks
from roomier.attention.kernels import attention_context
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.wrapped_forward import unwrap
from roomier.engine.compile import CompileClock, compile_blocks
from roomier.engine.first_forward import FirstForward, MakeContext, both
from roomier.loss.chunked import LossWatch, apply_chunked_loss
from roomier.plan import Plan
from roomier.precision.lstm import replace_missing_lstm_kernels
from roomier.precision.policy import Precision
from roomier.precision.sizes import size_warnings


@dataclass
class Levers:
    """What the engine asks of them at each step, and how they are taken away.

    Attributes:
        forward_context: what a step runs in.
        backward_context: what its backward runs in, where blocks are computed again.
        recompute: what blocks compute again; None where nothing is.
        output_layer: whose logits are computed when they are read; None where they are at once.
    """

    network: nn.Module
    forward_context: FirstForward
    backward_context: MakeContext
    recompute: Recompute | None = None
    output_layer: nn.Linear | None = None

    def end_update(self) -> None:
        """After each update of parameters."""
        if self.output_layer is not None:  # fused optimizers do not tell autograd that they write
            torch.autograd.graph.increment_version(list(self.output_layer.parameters()))

    def undo(self) -> None:
        """The network as it was; what was trained stays."""
        unwrap(self.network)


def apply_levers(plan: Plan, network: nn.Module, device: torch.device, precision: Precision, ranks: Ranks) -> Levers:
    """Put the levers of ``plan`` in place on ``network``, whose parameters are on ``device`` but not divided yet.

    Raises:
        RoomierError: the network has no blocks, or no output layer, that a lever needs.
    """
    kernel = attention_context(plan.attention, device, precision.autocast_dtype or precision.weight_dtype)
    context = precision.forward_context()
    levers = Levers(network, FirstForward(context if kernel is nullcontext else both(context, kernel)), kernel)
    levers.undo()  # those of an engine before this one
    replace_missing_lstm_kernels(network, precision)  # innermost: recomputed and compiled blocks call them
    for warning in size_warnings(network, precision, device):
        notice(warning)
    blocks = find_blocks(network)
    try:
        if plan.loss.chunked:
            levers.output_layer = apply_chunked_loss(network, plan.loss.chunk_tokens)
            levers.forward_context.watches.append(LossWatch(levers.output_layer))
        levers.recompute = apply_recompute(blocks, plan.activation, plan.offload, device, ranks)
        if plan.compile.enabled:
            compile_blocks(blocks, device)  # around what is computed again, so that the compiler sees it
            if levers.recompute is not None:
                levers.recompute.move_compiled()  # around that again: it does not see what moves
            levers.forward_context.watches.append(CompileClock())
    except BaseException:
        levers.undo()
        raise
    return levers
