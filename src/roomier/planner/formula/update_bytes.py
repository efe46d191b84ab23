"""Temporary memory of an optimizer during its update."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.planner.memory.kinds import Kind
from roomier.planner.memory.tracker import MemoryTracker
from roomier.planner.memory.walk import Layout, own_shape
from roomier.techniques.optim.adafactor import Adafactor
from roomier.techniques.optim.adamw import BlockwiseAdamW
from roomier.techniques.optim.muon import Muon

_SET_ELSEWHERE = ("params", "foreach", "capturable", "holds")


Key = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of this rank's shard of a weight."""


def update_bytes(optimizers: Sequence[Optimizer], layout: Layout, *, at_once: bool) -> dict[Kind, int]:
    """Return the peak of the temporary bytes during an update.

    Call this function inside :func:`~roomier.planner.fake.fake_world.fake_world`. Each optimizer performs a step on a
    few weights that have the shapes of a rank's shards; see :func:`few_alike`. If an update processes all weights
    together (``foreach``), the sizes for all shapes are summed.

    Args:
        optimizers: optimizers of the full model in its training form.
        layout: how the weights are sharded.
        at_once: whether torch updates lists of weights together if possible, as for unsharded weights on a GPU.
    """
    peak_bytes = 0
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind is torch.optim.Adafactor and layout.is_sharded:
            kind = Adafactor
        for group in optimizer.param_groups:
            is_whole = isinstance(optimizer, Muon) and bool(group.get("is_hidden"))
            keys = [_key(weight, layout, is_whole=is_whole) for weight in group["params"]]
            keys = [(shape, dtype) for shape, dtype in keys if math.prod(shape)]
            if at_once and "foreach" in group and not group.get("fused") and not layout.is_sharded:
                needed = sum(_bytes_of(optimizer, group, [key], kind) * count for key, count in Counter(keys).items())
            else:
                needed = _bytes_of(optimizer, group, few_alike(keys), kind)
            peak_bytes = max(peak_bytes, needed)
    return {Kind.TEMPORARY: peak_bytes}


def few_alike(keys: Sequence[Key]) -> list[Key]:
    """Return a short sequence that contains the same consecutive pairs as ``keys``.

    While a weight is updated, temporaries of the previous weight can still exist, so the order of shapes matters.
    """
    known: set[tuple[Key, Key]] = set()
    found = list(keys[:1])
    for pair in pairwise(keys):
        if pair not in known:
            found += pair if found[-1] != pair[0] else pair[1:]
            known.add(pair)
    return found


def _key(weight: Tensor, layout: Layout, *, is_whole: bool) -> Key:
    shape = tuple(weight.shape)
    return shape if is_whole else own_shape(shape, layout), weight.dtype


def _bytes_of(optimizer: Optimizer, group: Mapping[str, Any], keys: Sequence[Key], kind: type[Optimizer]) -> int:
    if not keys:
        return 0
    holder, made = _stepped(optimizer, group, keys, kind)
    with MemoryTracker(holder, [made], torch.device("cpu")) as tracker:
        tracker.restart()
        made.step()
        moments = [each.total() for each in tracker.moments()]
    return max(moments) - moments[0]


def state_tensors(optimizer: Optimizer, group: Mapping[str, Any], key: Key) -> list[int]:
    """Return the size in bytes of each state of a weight, except states that are scalars.

    Call this function inside :func:`~roomier.planner.fake.fake_world.fake_world`.
    """
    if not math.prod(key[0]):
        return []
    _, made = _stepped(optimizer, group, [key], type(optimizer))
    [states] = made.state.values()
    return [each.numel() * each.itemsize for each in states.values() if isinstance(each, Tensor) and each.dim() > 0]


def _stepped(
    optimizer: Optimizer, group: Mapping[str, Any], keys: Sequence[Key], kind: type[Optimizer]
) -> tuple[nn.ParameterList, Optimizer]:
    """Return weights with the shapes and dtypes in ``keys``, and an optimizer that updated them. The optimizer has the
    class ``kind`` and the settings of ``optimizer``."""
    holder = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype)) for shape, dtype in keys)
    weights = list(holder.parameters())
    known = {key: value for key, value in group.items() if key not in _SET_ELSEWHERE}
    arguments = cast(Any, kind).__init__.__code__.co_varnames
    made: Optimizer = cast(Any, kind)([{"params": weights, **known}], **_options(optimizer, arguments))
    if isinstance(made, BlockwiseAdamW) and isinstance(optimizer, BlockwiseAdamW):
        made.update_as(optimizer)
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    made.step()
    return holder, made


def _options(optimizer: Optimizer, arguments: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in optimizer.defaults.items() if key in arguments and key not in _SET_ELSEWHERE}
