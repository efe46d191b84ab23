"""Blocks that keep less for their backward than they computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from roomier.core.ranks import Ranks
from roomier.plan.parts import ActivationPlan, OffloadPlan


class Recompute:
    """What the engine tells the blocks at each step."""

    def begin_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Before the first micro-batch of a training step."""

    def end_step(self) -> None:
        """After the last backward of a training step, before the update."""


def apply_recompute(
    blocks: Sequence[nn.Module],
    activation: ActivationPlan,
    offload: OffloadPlan,
    device: torch.device,
    ranks: Ranks,
) -> Recompute | None:
    """Let ``blocks`` keep what ``activation`` says, on the device or where ``offload`` says; None where they keep all.

    Raises:
        RoomierError: there are no blocks.
    """
    return None
