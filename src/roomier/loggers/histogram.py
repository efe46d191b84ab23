"""Histogram: counts of values in bins. The counts of several shards of a tensor, computed with the same edges, add up
to the counts of the full tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from roomier.core.errors import RoomierError
from roomier.core.sharded import is_sharded

MAX_BINS = 512  # limit of wandb and trackio
_CHUNK = 2**22  # elements that are counted at a time, which bounds the temporary memory


@dataclass(frozen=True)
class Histogram:
    """Counts of the finite values in each bin.

    A bin contains its left edge, and the last bin contains both edges, as in ``numpy.histogram``.

    Attributes:
        counts: number of values in each bin.
        edges: edges of the bins, in ascending order; one more than there are bins.
    """

    counts: list[int]
    edges: list[float]

    @property
    def centers(self) -> list[float]:
        """The center of each bin."""
        return [(left + right) / 2 for left, right in pairwise(self.edges)]


def histogram_of(values: Any, bins: int | Sequence[float] = 64) -> Histogram:
    """Return the histogram of ``values``, or ``values`` itself if it is a histogram.

    Args:
        values: a tensor of any shape, an array, numbers, or a histogram. Values that are not finite are ignored.
        bins: number of bins of equal width between the smallest and the largest value, or the edges of the bins.

    Raises:
        RoomierError: ``values`` are not real numbers or are sharded, or ``bins`` is invalid.
    """
    if isinstance(values, Histogram):
        return values
    tensor = as_values(values)
    if is_sharded(tensor):
        problem = "is sharded, and a logger has only the values of its rank"
        action = "Call self.log_histogram of the module or a callback on every rank"
        raise RoomierError("log_histogram", tuple(tensor.shape), problem, action)
    least, largest = extent_of(tensor).tolist()
    edges = edges_of(least, largest, bins, tensor.dtype)
    return Histogram(count(tensor, edges).tolist(), edges)


def as_values(values: Any) -> Tensor:
    """Return ``values`` as a detached tensor.

    Raises:
        RoomierError: ``values`` are not real numbers.
    """
    try:
        tensor = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        action = "Pass a tensor, an array or a list of numbers"
        raise RoomierError("log_histogram", type(values).__name__, "must be numbers", action) from error
    if tensor.is_complex():
        raise RoomierError("log_histogram", tensor.dtype, "must be real numbers", "Pass values.abs()")
    return tensor


def extent_of(values: Tensor) -> Tensor:
    """Return the smallest and the largest finite value (shape (2), on the device of ``values``). Without a finite
    value, return infinity and -infinity."""
    least = torch.tensor(math.inf, dtype=_dtype_for(values.dtype), device=values.device)
    largest = -least
    for chunk in _chunks(values):
        is_finite = chunk.isfinite()
        least = least.minimum(chunk.where(is_finite, math.inf).amin())
        largest = largest.maximum(chunk.where(is_finite, -math.inf).amax())
    return torch.stack([least, largest])


def edges_of(
    least: float, largest: float, bins: int | Sequence[float], dtype: torch.dtype = torch.float32
) -> list[float]:
    """Return the edges of ``bins`` for values of ``dtype`` between ``least`` and ``largest``.

    Raises:
        RoomierError: ``bins`` is neither a number of bins nor ascending edges.
    """
    if isinstance(bins, int) and not isinstance(bins, bool) and 1 <= bins <= MAX_BINS:
        if not math.isfinite(least):  # no finite value
            least, largest = 0.0, 1.0
        if least == largest:
            margin = 0.5 * max(1.0, abs(least))
            least, largest = least - margin, largest + margin
        edges = [least * (1 - i / bins) + largest * (i / bins) for i in range(bins + 1)]
    else:
        edges = list(map(float, bins)) if isinstance(bins, (list, tuple, range, Tensor)) else []
        is_ascending = all(left < right for left, right in pairwise(edges))
        if not 2 <= len(edges) <= MAX_BINS + 1 or not is_ascending or not all(map(math.isfinite, edges)):
            action = f"Pass a number of bins up to {MAX_BINS}, or a list of edges"
            raise RoomierError("log_histogram: bins", bins, "must be a number of bins or ascending edges", action)
    return list(torch.tensor(edges, dtype=_dtype_for(dtype)).tolist())  # the edges that values are compared with


def count(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Return the number of values in each bin (int64, on the device of ``values``)."""
    num_bins = len(edges) - 1
    boundaries = torch.tensor(edges, dtype=_dtype_for(values.dtype), device=values.device)
    total = torch.zeros(num_bins, dtype=torch.int64, device=values.device)
    for chunk in _chunks(values):
        is_inside = (chunk >= boundaries[0]) & (chunk <= boundaries[-1])  # False for NaN
        index = torch.bucketize(chunk, boundaries[1:-1], right=True).where(is_inside, num_bins)
        total += torch.bincount(index, minlength=num_bins + 1)[:num_bins]
    return total


def _chunks(values: Tensor) -> Iterator[Tensor]:
    if values.numel():
        yield from (chunk.to(_dtype_for(values.dtype)) for chunk in torch.split(values.detach().reshape(-1), _CHUNK))


def _dtype_for(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
