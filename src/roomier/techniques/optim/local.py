"""Access to this rank's shard of a tensor, for optimizers with elementwise updates.

An elementwise update requires no communication, so the optimizer processes each shard as an ordinary tensor.
"""

from __future__ import annotations

import math

from torch import Tensor

from roomier.core import torch_private
from roomier.core.sharded import is_sharded


def local(tensor: Tensor) -> Tensor:
    """Return a detached view of this rank's shard of ``tensor``. For an ordinary tensor, return a view of the full
    tensor."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()


def first_element(tensor: Tensor) -> int:
    """Return the flat index of the first element of this rank's shard. The tensor must be sharded in dimension 0."""
    if not is_sharded(tensor) or not tensor.to_local().numel():
        return 0
    return torch_private.offsets_of_shard(tensor)[0] * math.prod(tensor.shape[1:])
