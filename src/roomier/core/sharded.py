"""Tensors that are sharded across ranks (DTensor), and this rank's shards of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from roomier.core import torch_offload

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Return True if ``tensor`` is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # late import, because it is slow

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the shard of ``tensor`` on this rank, or ``tensor`` if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def with_local_part(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor that is sharded like ``tensor``, with the local shard ``part``, which can be in host memory."""
    if not is_sharded(tensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    if part.device.type == "cpu" != mesh.device_type:
        made: Tensor = torch_offload.with_part_on_host(tensor, part)
        return made
    return type(tensor).from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
