"""The forward of a block, which keeps for its backward what it is told to, and computes the rest again.

[Note: computing again]
``torch.utils.checkpoint`` without reentrance: a block's graph is the usual one, but what it saves are places, filled by
a second forward once the backward asks for the first of them. Inputs need no gradient, hooks on gradients and
``backward(inputs=...)`` work, and the generators of random numbers and autocast are as they were in the first forward.
The reentrant kind would run a backward of its own inside the backward, past the hooks that reduce gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from roomier.activation.selective import products_kept
from roomier.core.wrapped_forward import WrappedForward


class Keep(StrEnum):
    """What a block keeps for its backward."""

    ALL = "all"
    """Everything: nothing is computed again."""
    PRODUCTS = "products"
    """Its input, and the results of matrix products and attention."""
    INPUT = "input"
    """Its input alone."""


class BlockForward(WrappedForward):
    """A block's forward. Without gradients (evaluation) it is the block's own.

    Attributes:
        module: the block.
        keep: what is kept; may be changed between steps.
        offloads: whether that waits in host memory; may be changed between steps.
    """

    def __init__(self, module: nn.Module, keep: Keep = Keep.ALL, *, offloads: bool = False) -> None:
        super().__init__(module)
        self.module = module
        self.keep = keep
        self.offloads = offloads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self.keep is Keep.ALL:
            return self.forward(*args, **kwargs)
        how = {"context_fn": products_kept} if self.keep is Keep.PRODUCTS else {}
        return checkpoint(self.forward, *args, use_reentrant=False, **how, **kwargs)


class Recompute:
    """What the engine tells the blocks at each step.

    Attributes:
        blocks: in the order of the network.
    """

    def __init__(self, blocks: Sequence[BlockForward]) -> None:
        self.blocks = list(blocks)

    def begin_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Before the first micro-batch of a training step."""

    def end_step(self) -> None:
        """After the last backward of a training step, before the update."""
