"""Prediction of the size of optimizer states before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import RoomierError
from roomier.techniques.optim.adamw import BlockwiseAdamW, blockwise_adamw_bytes
from roomier.techniques.optim.lion import Lion
from roomier.techniques.optim.muon import Muon

_COUNTER_BYTES = 4  # a float32 step counter
_PRIMES = (3, 5, 7, 11, 13, 17, 19)

# For each optimizer class: number of states with the size and dtype of the parameter, and number of scalar states.
_FULL_SIZE: dict[type[Optimizer], Callable[[Mapping[str, Any]], tuple[int, int]]] = {
    torch.optim.AdamW: lambda options: (2 + bool(options.get("amsgrad")), 1),
    torch.optim.Adam: lambda options: (2 + bool(options.get("amsgrad")), 1),
    torch.optim.SGD: lambda options: (int(bool(options.get("momentum"))), 0),
    torch.optim.RMSprop: lambda options: (1 + bool(options.get("momentum")) + bool(options.get("centered")), 1),
    torch.optim.Adagrad: lambda options: (1, 1),
    torch.optim.NAdam: lambda options: (2, 2),
    torch.optim.RAdam: lambda options: (2, 1),
    torch.optim.Muon: lambda options: (1, 0),
}


def state_bytes(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    whole_shape: tuple[int, ...] | None = None,
) -> int:
    """Return the size in bytes of ``optimizer``'s states for one parameter, or for one rank's shard of it.

    Args:
        group: options of the parameter's group (``momentum``, ``amsgrad``, ...).
        shape: shape of the shard that this rank updates.
        dtype: dtype of the weight in training.
        whole_shape: shape of the unsharded parameter; None means ``shape``.

    Raises:
        RoomierError: the states of the optimizer are unknown, and the optimizer cannot take a step on a small
            parameter.
    """
    kind, num_elements = type(optimizer), math.prod(shape)
    if isinstance(optimizer, BlockwiseAdamW):
        num_rows = shape[0] if shape else None
        return blockwise_adamw_bytes(
            whole_shape or shape, group["state_bits"], dtype, group["weight_rounding"], num_rows=num_rows
        )
    if isinstance(optimizer, Lion):
        return _lion_bytes(num_elements, dtype, group["weight_rounding"])
    if isinstance(optimizer, Muon):
        kind = torch.optim.Muon if group.get("is_hidden") else torch.optim.AdamW
    if issubclass(kind, torch.optim.Adafactor):
        return _adafactor_bytes(shape, whole_shape or shape, dtype)
    if kind in _FULL_SIZE:
        num_states, num_counters = _FULL_SIZE[kind](group)
        return num_states * num_elements * dtype.itemsize + num_counters * _COUNTER_BYTES
    return _measured_bytes(kind, group, shape, dtype) if num_elements else 0


def _adafactor_bytes(shape: tuple[int, ...], whole_shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the size in bytes of the row and column means (or the mean squares of a vector) and the step counter."""
    num_elements = math.prod(shape)
    if len(shape) > 1:
        # The column means of a matrix are replicated on every rank. If the matrix has one row, only the rank with this
        # row has the means.
        num_matrices = math.prod(shape[:-2]) if len(shape) > 2 else shape[0] if whole_shape[0] == 1 else 1
        num_elements = math.prod(shape[:-1]) + num_matrices * shape[-1]
    return num_elements * dtype.itemsize + _COUNTER_BYTES


def _lion_bytes(num_elements: int, dtype: torch.dtype, weight_rounding: str) -> int:
    """Return the size in bytes of the momentum, and of the low bits or the step counter that rounding bfloat16 weights
    requires."""
    if dtype is not torch.bfloat16:
        return num_elements * dtype.itemsize
    return 4 * num_elements + {"split": 2 * num_elements, "stochastic": _COUNTER_BYTES, "nearest": 0}[weight_rounding]


def _measured_bytes(
    kind: type[Optimizer], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    """Take one step on a small parameter, and return the total size in bytes of its states, scaled to ``shape``.

    The dimensions of the small parameter are different primes, so each dimension of a state identifies the
    corresponding dimension of the parameter.
    """
    small = _PRIMES[: len(shape)]
    copy = nn.Parameter(torch.ones(small, dtype=dtype))
    copy.grad = torch.ones_like(copy)
    known = {key: value for key, value in options.items() if key not in ("params", "fused", "foreach", "capturable")}
    try:
        optimizer = cast(Any, kind)([{"params": [copy], **known}])
        optimizer.step()
    except Exception as error:
        action = "Call report_of(engine) after the first step, when the states exist"
        raise RoomierError(
            "optimizer", kind.__name__, f"has states that are unknown before the first step: {error}", action
        ) from error
    sizes = dict(zip(small, shape, strict=True))
    states = [each for each in optimizer.state[copy].values() if isinstance(each, Tensor)]
    return sum(math.prod(sizes.get(size, size) for size in each.shape) * each.itemsize for each in states)
