"""Which bytes of a state this rank writes: each element of each tensor is written once, by one rank."""

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
class Part:
    """A box of a tensor that this rank holds.

    Attributes:
        name: of the whole tensor.
        offsets: where the box begins in it, for each dimension.
        tensor: the box itself.
        is_cut: the whole is spread over ranks.
    """

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor
    is_cut: bool = False


def parts_to_write(tensors: Mapping[str, Tensor], *, writes_whole: bool) -> list[Part]:
    """The parts of ``tensors`` that are this rank's to write; none of them is copied.

    Of a tensor cut among ranks each writes its own box; where several hold the same box (HSDP), they take turns from
    one tensor to the next. Empty boxes are left out.

    Args:
        writes_whole: whether this rank writes the tensors that are not cut.
    """
    found, turn = [], 0
    for name, tensor in tensors.items():
        if not is_cut(tensor):
            if writes_whole:
                found.append(Part(name, (0,) * tensor.dim(), tensor))
            continue
        turn += 1  # of the cut ones alone: they are the same on all ranks, the others may not be
        if not tensor.numel():  # nobody has a box of it
            if writes_whole:
                found.append(Part(name, (0,) * tensor.dim(), torch.empty(tensor.shape, dtype=tensor.dtype)))
        elif _is_mine(tensor, turn) and tensor.to_local().numel():
            found.append(Part(name, torch_private.offsets_of_shard(tensor), tensor.to_local(), is_cut=True))
    return found


def is_cut(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is spread over ranks (a DTensor, on any number of them)."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and needed only here

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
