"""What an optimizer needs beside its states while it updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from roomier.memory.kinds import Kind
from roomier.memory.tracker import MemoryTracker
from roomier.memory.walk import Layout, own_shape
from roomier.optim.muon import Muon

_SET_ELSEWHERE = ("params", "foreach", "capturable", "holds")


def update_bytes(optimizers: Sequence[Optimizer], layout: Layout, *, at_once: bool) -> dict[Kind, int]:
    """Temporary bytes at the peak of an update, inside :func:`~roomier.planner.fake.fake_world.fake_world`.

    Each optimizer takes a step on one weight of each shape that a rank has. What works weight by weight needs as much
    as the one that needs the most; torch's lists of all weights (``foreach``) need it for all together.

    Args:
        optimizers: over the weights of the whole model, as they are in training.
        layout: how these are cut.
        at_once: torch would take lists of weights where it may: on a GPU, for weights that are not cut.
    """
    peak_bytes = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            counts: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
            for weight in group["params"]:
                is_whole = isinstance(optimizer, Muon) and group.get("is_hidden")
                shape = tuple(weight.shape) if is_whole else own_shape(tuple(weight.shape), layout)
                key = (shape, weight.dtype)
                counts[key] = counts.get(key, 0) + 1
            is_list = at_once and "foreach" in group and not group.get("fused") and not layout.is_cut
            needs = [
                _bytes_of_one(optimizer, group, shape, dtype) * (count if is_list else 1)
                for (shape, dtype), count in counts.items()
                if math.prod(shape)
            ]
            peak_bytes = max(peak_bytes, sum(needs) if is_list else max(needs, default=0))
    return {Kind.TEMPORARY: peak_bytes}


def _bytes_of_one(optimizer: Optimizer, group: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    weight = nn.Parameter(torch.empty(shape, dtype=dtype))
    known = {key: value for key, value in group.items() if key not in _SET_ELSEWHERE}
    arguments = cast(Any, type(optimizer)).__init__.__code__.co_varnames
    made: Optimizer = cast(Any, type(optimizer))([{"params": [weight], **known}], **_options(optimizer, arguments))
    holder = nn.Module()
    holder.register_parameter("weight", weight)
    weight.grad = torch.empty_like(weight)
    made.step()
    with MemoryTracker(holder, [made], torch.device("cpu")) as tracker:
        tracker.restart()
        made.step()
        moments = [each.total() for each in tracker.moments()]
    return max(moments) - moments[0]


def _options(optimizer: Optimizer, arguments: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in optimizer.defaults.items() if key in arguments and key not in _SET_ELSEWHERE}
