"""Access to this rank's shard of a tensor, for optimizers with elementwise updates.

An elementwise update requires no communication, so the optimizer processes each shard as an ordinary tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roomier.core import torch_private
from roomier.core.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def local(tensor: Tensor) -> Tensor:
    """Return a detached view of this rank's shard of ``tensor``. For an ordinary tensor, return a view of the full
    tensor."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()


def first_element(tensor: Tensor) -> int:
    """Return the flat index of the first element of this rank's shard. The tensor must be sharded in dimension 0."""
    if not is_sharded(tensor) or not tensor.to_local().numel():
        return 0
    return torch_private.offsets_of_shard(tensor)[0] * math.prod(tensor.shape[1:])


def shard_group(parameter: Tensor) -> ProcessGroup | None:
    """Return the process group across which ``parameter`` is sharded, or None if it is not sharded."""
    if not is_sharded(parameter):
        return None
    [dim] = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
    return parameter.device_mesh.get_group(dim)


def sum_over(values: Sequence[Sequence[Tensor]], ranks: ProcessGroup | None) -> Sequence[Sequence[Tensor]]:
    """Return ``values`` (1-dim tensors), summed over the ranks in one collective."""
    if ranks is None:
        return values
    import torch.distributed as dist  # already imported if a tensor is sharded

    joined = torch.cat([each for row in values for each in row])
    dist.all_reduce(joined, group=ranks)
    split = iter(torch.split(joined, [len(each) for row in values for each in row]))
    return [[next(split) for _ in row] for row in values]
