"""Norm of sharded gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from roomier.core import torch_private


def join_norms(norms: Mapping[Tensor, Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return the norm of all gradients over all shards (0-dim), which is identical on all ranks.

    If a parameter is sharded, this function runs one collective.

    Args:
        norms: norm of this rank's shard of each gradient, by sharded or unsharded parameter.
        group: the ranks that share each sharded parameter.
    """
    sharded = [norm for parameter, norm in norms.items() if isinstance(parameter, DTensor)]
    whole = [norm for parameter, norm in norms.items() if not isinstance(parameter, DTensor)]
    norm = torch_private.join_norms(whole)
    if sharded:
        square = torch_private.join_norms(sharded).square()
        dist.all_reduce(square, group=group)
        norm = torch.hypot(square.sqrt(), norm) if whole else square.sqrt()
    return norm
