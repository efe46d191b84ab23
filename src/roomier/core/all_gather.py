"""All-gather of nested tensors and numbers, optionally with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.ranks import Ranks
from roomier.core.tree import map_tensors


def all_gather(data: Any, ranks: Ranks, device: torch.device, group: Any = None, *, has_gradients: bool = False) -> Any:
    """Return ``data`` with each tensor stacked over the ranks, so shape (...) becomes shape (ranks, ...).

    Numbers become tensors on ``device``. Every rank must call this function with tensors of the same shapes. With one
    rank, tensors are returned unchanged.

    Args:
        group: process group; None selects all ranks, or those of the same stage, because a step does not reach the
            same calls on other stages.
        has_gradients: True to make the result differentiable. In the backward pass, the gradient of the result is
            summed over the ranks, and each rank receives its slice of the sum.
    """
    if ranks.mesh.stage > 1 and group is None:
        ranks, group = ranks.data, ranks.data.process_group

    def gathered(leaf: Any) -> Tensor:
        tensor = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf, device=device)
        if ranks.is_alone:
            return tensor
        tensor = tensor.contiguous()
        if has_gradients:
            result: Tensor = _AllGather.apply(tensor, group)  # type: ignore[no-untyped-call]
            return result
        return _stacked(tensor, group)

    return map_tensors(gathered, data, is_leaf=lambda leaf: isinstance(leaf, (bool, int, float)))


def _stacked(tensor: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach(), group=group)
    return torch.stack(parts)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _stacked(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
