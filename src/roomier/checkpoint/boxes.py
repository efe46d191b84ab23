"""Division of a state into the parts that each rank writes. Each element of each tensor is written exactly once, by one
rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roomier.core import torch_private

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


@dataclass(frozen=True)
class TensorBox:
    """Box (a rectangular region) of a tensor on this rank.

    Attributes:
        name: name of the full tensor.
        offsets: first index of the box in the full tensor, for each dimension.
        tensor: the box.
        is_sharded: True if the full tensor is sharded across ranks.
    """

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor
    is_sharded: bool = False


def parts_to_write(tensors: Mapping[str, Tensor], *, writes_whole: bool) -> list[TensorBox]:
    """Return the parts of ``tensors`` that this rank writes. No tensor is copied.

    Each rank writes its shard of a sharded tensor. If several ranks have the same shard (HSDP), these ranks take turns:
    each rank writes the shards of different tensors. Empty shards are skipped.

    Args:
        tensors: mapping from names to the tensors of a state.
        writes_whole: True if this rank writes the tensors that are not sharded.
    """
    found, turn = [], 0
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            if writes_whole:
                found.append(TensorBox(name, (0,) * tensor.dim(), tensor))
            continue
        turn += 1  # Count sharded tensors only, because only these tensors are the same on all ranks.
        if not tensor.numel():  # no rank has a shard with elements
            if writes_whole:
                found.append(TensorBox(name, (0,) * tensor.dim(), torch.empty(tensor.shape, dtype=tensor.dtype)))
        elif _is_mine(tensor, turn) and tensor.to_local().numel():
            found.append(TensorBox(name, torch_private.offsets_of_shard(tensor), tensor.to_local(), is_sharded=True))
    return found


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Return True if ``tensor`` is a DTensor, even on a single rank."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # late import: it is slow, and most processes do not need it

    return isinstance(tensor, DTensor)


def _is_mine(tensor: DTensor, turn: int) -> bool:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    sizes = mesh.shape
    copies = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    writer = turn % math.prod(sizes[dim] for dim in copies)
    for dim in copies:
        writer, at = divmod(writer, sizes[dim])
        if coordinate[dim] != at:
            return False
    return True
