"""This rank's part of a tensor, for optimizers that update each element by itself.

Such an update needs no other rank: it runs on plain tensors, and never asks what it was cut by.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from roomier.core import torch_private

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_cut(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is spread over ranks."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # slow to import; who cut a tensor has done so

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` on this rank, without gradient; it shares memory. All of it where it is not cut."""
    return tensor.to_local().detach() if is_cut(tensor) else tensor.detach()


def first_element(tensor: Tensor) -> int:
    """Where this rank's part begins in the whole tensor, flat; parts are cut from dimension 0 alone."""
    if not is_cut(tensor) or not tensor.to_local().numel():
        return 0
    return torch_private.offsets_of_shard(tensor)[0] * math.prod(tensor.shape[1:])
