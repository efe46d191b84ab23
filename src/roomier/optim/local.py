"""This rank's shard of a tensor, for elementwise optimizers.

An elementwise update requires no communication. The optimizer runs on ordinary tensors and does not depend on the
sharding.
"""

from __future__ import annotations

import math

from torch import Tensor

from roomier.core import torch_private
from roomier.core.sharded import is_sharded


def local(tensor: Tensor) -> Tensor:
    """Return a detached view of this rank's shard of ``tensor``. The view of an ordinary tensor is the full tensor."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()


def first_element(tensor: Tensor) -> int:
    """Return the flat index of the first element of this rank's shard. Tensors are sharded only in dimension 0."""
    if not is_sharded(tensor) or not tensor.to_local().numel():
        return 0
    return torch_private.offsets_of_shard(tensor)[0] * math.prod(tensor.shape[1:])
