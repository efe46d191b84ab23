"""Apply activation checkpointing and offloading to the blocks of a network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from roomier.core import torch_fake
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.wrapped_forward import install
from roomier.plan.choices import POLICIES, ImportedChoice
from roomier.plan.parts import ActivationPlan, OffloadPlan
from roomier.techniques.activation.block_forward import BlockForward, Keep, MakeContext, Recompute
from roomier.techniques.activation.budget import BudgetedRecompute
from roomier.techniques.activation.copies import Offload
from roomier.techniques.activation.disk_copies import DiskCopies
from roomier.techniques.tiers.scratch import Scratch


def apply_recompute(
    blocks: Sequence[nn.Module],
    activation: ActivationPlan,
    offload: OffloadPlan,
    device: torch.device,
    ranks: Ranks,
) -> Recompute:
    """Configure ``blocks`` to save the activations that ``activation`` selects, on the device or in the tier that
    ``offload`` names.

    Args:
        blocks: blocks of the network.
        activation: policy for the saved activations.
        offload: settings for offloading.
        device: device on which the blocks run.
        ranks: ranks that make the same choice if there is a memory budget.

    Returns:
        The :class:`Recompute` for the engine. It contains no blocks if all blocks save all activations on the device.

    Raises:
        RoomierError: the model has no blocks or too few blocks, offloading cannot help to meet a budget because it
            saves no memory on ``device``, or the folder for offloading cannot be used.
    """
    tier = offload.activations
    if activation.policy == "none" and tier == "none":
        return Recompute(())
    if not blocks:
        problem = "requires blocks (layers that repeat), but the model has no blocks"
        action = "Define a method model_blocks() that returns the layers that repeat"
        raise RoomierError(*_asked(activation, tier), problem, action)
    keeps = keeps_of(activation, len(blocks))
    if activation.policy == "every_n" and Keep.INPUT not in keeps:
        problem = f"must be at most the number of blocks of the model ({len(blocks)}); otherwise no block is recomputed"
        action = "Use 'full' or a smaller number"
        raise RoomierError("activation_checkpointing.every_n", activation.every_n or 2, problem, action)
    where = _offload(offload, device)
    if where is not None and not where.copies.saves:
        if activation.policy == "budget":
            problem = f"frees no memory on the device {device.type!r}, so offloading cannot help to meet a budget"
            action = (
                "Remove offload, so that the budget only selects the activations to recompute, or use the tier 'disk'"
            )
            raise RoomierError("offload.activations", "cpu", problem, action)
        notice(
            "offload: activations are already in host memory on this device, so moving them saves no memory; "
            "offload={'activations': 'disk'} moves them to disk"
        )
    forwards = [
        BlockForward(block, keep, where) if isinstance(keep, Keep) else BlockForward(block, context=keep)
        for block, keep in zip(blocks, keeps, strict=True)
    ]
    for forward in forwards:
        install(forward.module, forward)
    recompute = Recompute(forwards)
    if activation.policy == "budget":
        try:
            return BudgetedRecompute(forwards, activation, device=device, ranks=ranks)
        except BaseException:
            recompute.close()
            raise
    return recompute


def _offload(offload: OffloadPlan, device: torch.device) -> Offload | None:
    match offload.activations:
        case "none":
            return None
        case "disk" if not torch_fake.makes_fake_tensors():  # a dry run moves no tensors
            return Offload(device, copies=DiskCopies(device, Scratch(offload.folder)))
        case _:
            return Offload(device)


def keeps_of(activation: ActivationPlan, num_blocks: int) -> list[Keep | MakeContext]:
    """Return the initial setting of each block. With ``every_n``, blocks n-1, 2n-1, ... are recomputed.

    Raises:
        RoomierError: a policy of an extension returns a different number of settings.
    """
    match activation.policy:
        case "full":
            return [Keep.INPUT] * num_blocks
        case "selective":
            return [Keep.PRODUCTS] * num_blocks
        case "every_n":
            n = activation.every_n or 2
            return [Keep.INPUT if index % n == n - 1 else Keep.ALL for index in range(num_blocks)]
        case "none" | "budget":
            return [Keep.ALL] * num_blocks
    choice = POLICIES[activation.policy]
    assert isinstance(choice, ImportedChoice), f"policy {activation.policy!r} has no implementation"
    keeps: list[Keep | MakeContext] = list(choice.load()(num_blocks))
    if len(keeps) != num_blocks:
        problem = f"returned {len(keeps)} settings for {num_blocks} blocks"
        raise RoomierError("activation_checkpointing", activation.policy, problem, f"Correct {choice.made_by}")
    return keeps


def _asked(activation: ActivationPlan, tier: str) -> tuple[str, object]:
    if activation.policy == "none":
        return "offload", {"activations": tier}
    return "activation_checkpointing", activation.policy
