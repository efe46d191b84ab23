"""Low-rank adapters on linear layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from roomier.plan.parts import AdapterPlan


def apply_lora(network: nn.Module, blocks: Sequence[nn.Module], plan: AdapterPlan) -> None:
    """Freeze ``network`` and put adapters on the linear layers that ``plan`` names, in place; those that are there
    already stay.

    Raises:
        RoomierError: no layer has such a name, or the adapters that are there are of another rank.
    """


def quantise_base(network: nn.Module, plan: AdapterPlan) -> None:
    """Keep the frozen weights of adapted layers in the few bits that ``plan`` names, in place."""
