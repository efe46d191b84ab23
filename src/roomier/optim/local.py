"""This rank's shard of a tensor, for elementwise optimizers.

An elementwise update requires no communication. The optimizer runs on ordinary tensors and does not depend on the
sharding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from roomier.core import torch_private

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Return True if ``tensor`` is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # slow import; a sharded tensor already loaded it

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``, without a gradient, as a view. An ordinary tensor is returned in full."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()


def first_element(tensor: Tensor) -> int:
    """Return the flat index of the first element of this rank's shard. Tensors are sharded in dimension 0 only."""
    if not is_sharded(tensor) or not tensor.to_local().numel():
        return 0
    return torch_private.offsets_of_shard(tensor)[0] * math.prod(tensor.shape[1:])
