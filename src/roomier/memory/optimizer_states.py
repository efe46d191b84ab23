"""The bytes an optimizer keeps for a parameter, before it has taken a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import RoomierError

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
}


def state_bytes(kind: type[Optimizer], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What ``kind`` keeps for one parameter, or for one rank's part of it.

    Args:
        options: of its parameter group (``momentum``, ``amsgrad``, ...).
        shape: of what this rank updates.

    Raises:
        RoomierError: ``kind`` is none whose states are known, and cannot take a step without a model.
    """
    if not math.prod(shape):
        return 0 if kind not in _FULL_SIZE else _FULL_SIZE[kind](options)[1] * _COUNTER_BYTES
    if kind not in _FULL_SIZE:
        return _measured_bytes(kind, options, shape, dtype)
    num_states, num_counters = _FULL_SIZE[kind](options)
    return num_states * math.prod(shape) * dtype.itemsize + num_counters * _COUNTER_BYTES


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
