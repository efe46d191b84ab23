"""Tensors that are sharded across ranks (DTensor), and this rank's shards of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from roomier.core import torch_offload, torch_private

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


def local_rows(tensor: Tensor) -> slice:
    """Return the rows of ``tensor`` on this rank. The tensor must be unsharded, or sharded along its first
    dimension."""
    if not is_sharded(tensor):
        return slice(0, tensor.shape[0])
    own = tensor.to_local()
    first = torch_private.offsets_of_shard(tensor)[0] if own.numel() else 0
    return slice(first, first + own.shape[0])


def with_local_part(
    tensor: Tensor, part: Tensor, shape: Sequence[int] | None = None, *, is_replicated: bool = False
) -> Tensor:
    """Return a tensor that is sharded like ``tensor``, with the local shard ``part``. If ``tensor`` is not sharded,
    return ``part``.

    Args:
        part: the shard, which can be in host memory if ``shape`` is None.
        shape: unsharded shape of the result; None means the shape of ``tensor``.
        is_replicated: True if each rank has the full result in ``part``.
    """
    if not is_sharded(tensor):
        return part
    mesh, placements = tensor.device_mesh, tensor.placements
    if shape is None and part.device.type == "cpu" != mesh.device_type:
        made: Tensor = torch_offload.with_part_on_host(tensor, part)
        return made
    from torch.distributed.tensor import Replicate  # already imported if a tensor is sharded

    like = tensor if shape is None else torch.empty(tuple(shape), device="meta")
    own = [Replicate()] * mesh.ndim if is_replicated else placements
    return type(tensor).from_local(part, mesh, own, run_check=False, shape=like.shape, stride=like.stride())
