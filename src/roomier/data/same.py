"""Compare two states: nested dicts and lists of plain values, tensors and arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, equal


def is_same(one: Any, other: Any) -> bool:
    """Return True if both states have the same structure and equal values."""
    if isinstance(one, Mapping):
        is_alike = isinstance(other, Mapping) and one.keys() == other.keys()
        return is_alike and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        is_alike = isinstance(other, (list, tuple)) and len(one) == len(other)
        return is_alike and all(map(is_same, one, other))
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)
