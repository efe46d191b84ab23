"""Gradients that are there as one tensor on every rank, added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.core.ranks import Ranks


def average_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks, wire_dtype: torch.dtype | None = None) -> bool:
    """Average the gradients of ``parameters`` over all ranks, in place; one that is missing on some counts as zero.

    Args:
        wire_dtype: in which they travel; None as they are.

    Returns:
        Whether one was missing on any rank. A gradient that is missing on all stays so.
    """
    used, is_unused = fill_missing_gradients(parameters, ranks)
    for group in _by_dtype(used):
        gradients = [each.grad for each in group if each.grad is not None]
        _put_back(gradients, _summed(gradients, wire_dtype).div_(dist.get_world_size()))
    return is_unused


def add_up_gradients(parameters: Sequence[nn.Parameter], num_shares: int = 1) -> None:
    """The sum over all ranks of the gradients of ``parameters``, which every rank has, by ``num_shares``, in place.

    They are few, so those of 16 bits travel, and are added up, in float32.
    """
    for group in _by_dtype(parameters):
        gradients = [each.grad for each in group if each.grad is not None]
        total = _summed(gradients, torch.promote_types(gradients[0].dtype, torch.float32))
        _put_back(gradients, total if num_shares == 1 else total.div_(num_shares))


def fill_missing_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks) -> tuple[list[nn.Parameter], bool]:
    """Zeros where a gradient is missing on this rank and not on all.

    Returns:
        Those of ``parameters`` that have a gradient on any rank, and whether one was missing on any rank.
    """
    num_with = torch.tensor([float(each.grad is not None) for each in parameters])
    if parameters:
        num_with = ranks.sum(num_with.to(parameters[0].device))
    counts = num_with.tolist()
    used = [each for each, count in zip(parameters, counts, strict=True) if count]
    for each in used:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
    return used, any(count < ranks.world.size for count in counts)


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [list(group) for _, group in groupby(sorted(parameters, key=_dtype_name), _dtype_name)]


def _dtype_name(parameter: nn.Parameter) -> str:
    return str(parameter.dtype)


def _summed(gradients: Sequence[Tensor], wire_dtype: torch.dtype | None) -> Tensor:
    flat = torch.cat([each.flatten() for each in gradients]).to(wire_dtype)
    dist.all_reduce(flat)
    return flat


def _put_back(gradients: Sequence[Tensor], flat: Tensor) -> None:
    for gradient, part in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
