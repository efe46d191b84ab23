"""Blocks that keep less for their backward than they computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from roomier.activation.block_forward import BlockForward, Keep, Recompute
from roomier.activation.budget import BudgetedRecompute
from roomier.activation.offload import Offload
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.wrapped_forward import install
from roomier.plan.parts import ActivationPlan, OffloadPlan


def apply_recompute(
    blocks: Sequence[nn.Module],
    activation: ActivationPlan,
    offload: OffloadPlan,
    device: torch.device,
    ranks: Ranks,
) -> Recompute:
    """Let ``blocks`` keep what ``activation`` says, on the device or where ``offload`` says.

    Returns:
        The recomputation, without blocks if all of them keep everything on the device.

    Raises:
        RoomierError: there are no blocks, or too few; or a budget may offload from a device that gains nothing by it.
    """
    may_offload = offload.activations == "cpu"
    if activation.policy == "none" and not may_offload:
        return Recompute(())
    if not blocks:
        problem = "the model has no blocks, by which activations are kept: nothing in it repeats"
        action = "Give it a model_blocks() that returns the layers that repeat"
        raise RoomierError(*_asked(activation), problem, action)
    keeps = keeps_of(activation, len(blocks))
    if activation.policy == "every_n" and Keep.INPUT not in keeps:
        problem = f"is more than the {len(blocks)} blocks of the model: nothing would be computed again"
        raise RoomierError("activation_checkpointing.every_n", activation.every_n or 2, problem, "Use 'full', or fewer")
    where = Offload(device) if may_offload else None
    if where is not None and not where.saves:
        if activation.policy == "budget":
            problem = f"moves nothing out of the memory of the device {device.type!r}, and so helps no budget here"
            action = "Leave out offload: a budget alone chooses what to compute again; or use a GPU"
            raise RoomierError("offload.activations", "cpu", problem, action)
        notice("offload: activations already are in host memory on this device; moving them saves nothing here")
    forwards = [BlockForward(block, keep, where) for block, keep in zip(blocks, keeps, strict=True)]
    for forward in forwards:
        install(forward.module, forward)
    if activation.policy == "budget":
        return BudgetedRecompute(forwards, activation, device=device, ranks=ranks)
    return Recompute(forwards)


def keeps_of(activation: ActivationPlan, num_blocks: int) -> list[Keep]:
    """What each block keeps at the start. Of every ``n`` the last is computed again: the blocks n-1, 2n-1, ..."""
    match activation.policy:
        case "full":
            return [Keep.INPUT] * num_blocks
        case "selective":
            return [Keep.PRODUCTS] * num_blocks
        case "every_n":
            n = activation.every_n or 2
            return [Keep.INPUT if index % n == n - 1 else Keep.ALL for index in range(num_blocks)]
        case _:
            return [Keep.ALL] * num_blocks


def _asked(activation: ActivationPlan) -> tuple[str, object]:
    if activation.policy == "none":
        return "offload", {"activations": "cpu"}
    return "activation_checkpointing", activation.policy
