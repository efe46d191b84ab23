"""Checks of the arguments ``batch_size`` and ``reduce_fx`` of ``log``."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from roomier.core.errors import RoomierError, did_you_mean
from roomier.run.logged.over_ranks import REDUCTIONS


def weight_of(batch_size: Any) -> Any:
    """Return ``batch_size`` as a number or a tensor. A tensor is not checked, because the check would wait for the
    device.

    Raises:
        RoomierError: ``batch_size`` is neither a non-negative number nor a tensor.
    """
    is_number = isinstance(batch_size, Real) and float(batch_size) >= 0
    if not is_number and not isinstance(batch_size, Tensor):
        action = "Pass the number of samples (or tokens) over which the value is averaged"
        raise RoomierError("log: batch_size", batch_size, "must be a non-negative number", action)
    return batch_size


def reduction_of(reduce_fx: Any) -> str:
    """Return the name of the reduction ``reduce_fx``.

    Raises:
        RoomierError: the reduction is not supported.
    """
    if isinstance(reduce_fx, str):
        name = {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
    else:
        name = next((each for each, fx in _FUNCTIONS.items() if reduce_fx in fx), getattr(reduce_fx, "__name__", "?"))
        if name in REDUCTIONS and reduce_fx not in _FUNCTIONS[name]:
            name = f"{getattr(reduce_fx, '__module__', '?')}.{name}"
    if name not in REDUCTIONS:
        advice = did_you_mean(name, REDUCTIONS)
        advice += f"{'' if advice.endswith('?') else '.'} For another reduction, log a torchmetrics object"
        raise RoomierError("log: reduce_fx", reduce_fx, "is not a known reduction", advice)
    return name


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mean": (torch.mean,),
    "sum": (torch.sum, sum),
    "min": (torch.min, min),
    "max": (torch.max, max),
}
