"""Collectives on nested tensors and objects, with the same results as in Accelerate.

With one rank, tensors are returned unchanged. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roomier.core.all_gather import all_gather
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.ranks import Ranks
from roomier.core.tree import map_tensors, tensors
from roomier.techniques.loss.lazy_logits import computed

REDUCTIONS = ("sum", "mean", "max", "none")


def gathered(data: Any, ranks: Ranks, device: torch.device) -> Any:
    """Return ``data`` with each tensor concatenated over the ranks along its first dimension.

    A 0-dim tensor becomes a tensor with one element per rank.

    Raises:
        TrainingError: a tensor has a different shape on another rank.
    """
    data = computed(data)  # some losses compute the logits only when they are read
    if ranks.is_alone:
        return data
    shapes = ranks.gather([tuple(each.shape) for each in tensors(data)])
    other = next((number for number, each in enumerate(shapes) if each != shapes[0]), None)
    if other is not None:
        problem = f"have shapes {shapes[other]} on rank {other}, but {shapes[0]} on rank 0"
        action = "Call accelerator.pad_across_processes first, or gather objects: gather_for_metrics(..., True)"
        raise TrainingError("gathered tensors", len(shapes[0]), problem, action)
    return map_tensors(lambda each: each.flatten(0, 1) if each.dim() > 1 else each, all_gather(data, ranks, device))


def reduced(data: Any, reduction: str, ranks: Ranks) -> Any:
    """Return ``data`` with each tensor reduced over the ranks.

    Args:
        data: tensors of the same shapes on every rank.
        reduction: ``"sum"``, ``"mean"``, ``"max"``, or ``"none"``, which also sums, as in Accelerate.
        ranks: all ranks.

    Raises:
        RoomierError: ``reduction`` is unknown.
    """
    if reduction not in REDUCTIONS:
        raise RoomierError("reduction", reduction, "is unknown", f"Use one of: {', '.join(REDUCTIONS)}")

    def reduce_one(tensor: Tensor) -> Tensor:
        if ranks.is_alone:
            return tensor.clone()
        if reduction == "max":
            largest: Tensor = all_gather(tensor, ranks, tensor.device).amax(0)
            return largest
        total = ranks.sum(tensor)
        return total / ranks.world.size if reduction == "mean" else total

    return map_tensors(reduce_one, data)


def padded(data: Any, dim: int, value: float, *, first: bool, ranks: Ranks) -> Any:
    """Return ``data`` with each tensor padded along ``dim`` to its largest size over the ranks.

    A tensor without this dimension is unchanged.

    Args:
        data: nested tensors.
        dim: dimension to pad; negative values count from the end.
        value: value of the added elements.
        first: True to add elements at the start instead of the end.
        ranks: all ranks.
    """
    if ranks.is_alone:
        return data
    sizes = iter(zip(*ranks.gather([_size(each, dim) for each in tensors(data)]), strict=True))

    def pad(tensor: Tensor) -> Tensor:
        own, largest = _size(tensor, dim), max(next(sizes))
        if own == largest:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = largest - own
        added = tensor.new_full(shape, value)
        return torch.cat([added, tensor] if first else [tensor, added], dim)

    return map_tensors(pad, data)


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else 0


def part_of_rank(inputs: Any, ranks: Ranks, *, pads: bool) -> Any:
    """Return the elements of ``inputs`` that belong to this rank. If the elements cannot be divided evenly, the first
    ranks receive one additional element each.

    Args:
        inputs: a list, tuple or tensor, or a dict of values with the same number of elements.
        ranks: all ranks.
        pads: if True, repeat the last element, so that all ranks receive the same number of elements.

    Raises:
        RoomierError: the values of a dict have different lengths.
    """
    size, rank = ranks.world.size, ranks.world.rank
    if size == 1:
        return inputs
    lengths = {len(each) for each in inputs.values()} if isinstance(inputs, Mapping) else {len(inputs)}
    if len(lengths) != 1:
        raise RoomierError("inputs", sorted(lengths), "has values of different lengths", "Pass values of equal length")
    [length] = lengths
    each, num_larger = divmod(length, size)
    begin = rank * each + min(rank, num_larger)
    end = begin + each + (rank < num_larger)
    num_padded = each + (num_larger > 0) - (end - begin) if pads else 0

    def take(values: Any) -> Any:
        own = values[begin:end]
        if not num_padded or not length:
            return own
        last = values[-1:] if begin >= length else own[-1:]
        if isinstance(values, Tensor):
            return torch.cat([own, *[last] * num_padded])
        return own + last * num_padded

    return {key: take(value) for key, value in inputs.items()} if isinstance(inputs, Mapping) else take(inputs)
