"""Gradient clipping for sharded gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from roomier.core import torch_private


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients of ``parameters`` by their norm over all shards, as ``torch.nn.utils.clip_grad_norm_`` does.

    If a gradient is sharded, this function runs one collective.

    Args:
        parameters: sharded and unsharded parameters.
        max_norm: upper bound of the total 2-norm.

    Returns:
        Total norm before clipping (0-dim), which is identical on all ranks.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    sharded = [(_local(each), group) for each in gradients if (group := _shard_group(each)) is not None]
    whole = [_local(each) for each in gradients if _shard_group(each) is None]
    norm = get_total_norm(whole)
    if sharded:
        of_shards = over_ranks(get_total_norm([local for local, _ in sharded]), sharded[0][1])
        norm = torch.hypot(of_shards, norm) if whole else of_shards
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch_private.scale_each([*whole, *(local for local, _ in sharded)], factor)
    return norm


def over_ranks(norm: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the norm (0-dim) of a sharded tensor, computed from the shard norms of all ranks in ``group``."""
    square = norm.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def clip_grad_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clip the gradients of ``parameters`` like ``torch.nn.utils.clip_grad_value_``. Every rank clips its own
    shards."""
    for each in parameters:
        if each.grad is not None:
            _local(each.grad).clamp_(-max_value, max_value)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _shard_group(gradient: Tensor) -> dist.ProcessGroup | None:
    if not isinstance(gradient, DTensor):
        return None
    for dim, placement in enumerate(gradient.placements):
        if isinstance(placement, Shard):
            return gradient.device_mesh.get_group(dim)
    return None
