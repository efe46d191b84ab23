"""The bytes an optimizer keeps for a parameter, before it has taken a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import RoomierError
from roomier.optim.adamw import BlockwiseAdamW, blockwise_adamw_bytes
from roomier.optim.lion import Lion
from roomier.optim.muon import Muon

_COUNTER_BYTES = 4  # the number of steps, a float32
_PRIMES = (3, 5, 7, 11, 13, 17, 19)

# How many states of the parameter's own size and dtype an optimizer keeps, and how many numbers beside.
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
    """What ``optimizer`` keeps for one parameter, or for one rank's part of it.

    Args:
        group: settings of its parameter group (``momentum``, ``amsgrad``, ...).
        shape: of what this rank updates.
        dtype: of the weight in training.
        whole_shape: of the parameter on all ranks; None is ``shape``.

    Raises:
        RoomierError: its states are not known, and it cannot take a step without a model.
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
    if kind in _FULL_SIZE:
        num_states, num_counters = _FULL_SIZE[kind](group)
        return num_states * num_elements * dtype.itemsize + num_counters * _COUNTER_BYTES
    return _measured_bytes(kind, group, shape, dtype) if num_elements else 0


def _lion_bytes(num_elements: int, dtype: torch.dtype, weight_rounding: str) -> int:
    """One momentum, and what weights of bfloat16 have no room for, or the step count of what is added at random."""
    if dtype is not torch.bfloat16:
        return num_elements * dtype.itemsize
    return 4 * num_elements + {"split": 2 * num_elements, "stochastic": _COUNTER_BYTES, "nearest": 0}[weight_rounding]


def onebit_adam_bytes(num_elements: int, num_ranks: int, *, rounds_variance: bool) -> int:
    """What 1-bit Adam keeps for a parameter after its freeze: the error of this rank, the denominator, the error of the
    piece it owns. Before the freeze it is less: two moments of that piece. Its messages are not counted."""
    piece = math.ceil(num_elements / num_ranks)
    return num_elements * (4 + (2 if rounds_variance else 4)) + piece * 4


def _measured_bytes(
    kind: type[Optimizer], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    """One step on a small copy whose sizes are different primes: so each size of a state tells which of the parameter's
    it follows."""
    small = _PRIMES[: len(shape)]
    copy = nn.Parameter(torch.ones(small, dtype=dtype))
    copy.grad = torch.ones_like(copy)
    known = {key: value for key, value in options.items() if key not in ("params", "fused", "foreach", "capturable")}
    try:
        optimizer = cast(Any, kind)([{"params": [copy], **known}])
        optimizer.step()
    except Exception as error:
        action = "Call report_of(engine) after the first step, where the states are there"
        raise RoomierError(
            "optimizer", kind.__name__, f"its states are not known before a step: {error}", action
        ) from error
    sizes = dict(zip(small, shape, strict=True))
    states = [each for each in optimizer.state[copy].values() if isinstance(each, Tensor)]
    return sum(math.prod(sizes.get(size, size) for size in each.shape) * each.itemsize for each in states)
