"""Images, figures and histograms that a module or a callback logs.

[Note: histograms of shards]
A histogram of tensors that are sharded across ranks takes two collectives for all tensors together: the smallest and
the largest values determine the same edges on all ranks, and the counts of the shards with these edges are summed.
Integers have no rounding, so the counts equal the counts of one process with the same values. Each shard is counted on
one of the ranks that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roomier.core.errors import RoomierError
from roomier.core.mesh import CONTEXT, OUTER
from roomier.core.metric_names import check_metric_name
from roomier.core.ranks import Ranks
from roomier.core.sharded import is_sharded, local_part
from roomier.loggers.group import takes
from roomier.loggers.histogram import Histogram, count, edges_of, extent_of, histogram_of
from roomier.loggers.pixels import captions_of, figure_of, pixels_of
from roomier.run.run import Run

Look = Callable[[Tensor, Tensor], None]
"""Function that is called with a tensor and this rank's values of it."""


def log_visual(
    run: Run, method: str, key: str, value: Any, *, caption: Any = None, bins: int | Sequence[float] = 64
) -> None:
    """Call ``method`` of the loggers; see the method of :class:`roomier.Module` with the same name.

    Raises:
        RoomierError: ``value`` is not valid for ``method``, or no step or epoch is running.
    """
    if run.results.stage is None:
        raise RoomierError(method, key, "no step or epoch is running", "Log in a step or in a hook of the loop")
    check_metric_name(method, str(key))
    if run.trainer.sanity_checking:
        return
    if not takes(run.trainer.loggers, method):
        run.loggers.show(method, key, value, run.log_step)  # each logger reports that it cannot show the value
        return
    if not run.ranks.is_alone and is_sharded(value):  # every rank of a stage has a shard, so it must call this function
        if method == "log_histogram":
            value = histograms(
                run.ranks.along(CONTEXT, *OUTER), {key: value}, lambda look: look(value, local_part(value)), bins
            ).get(key)
        else:
            value = value.full_tensor()
    if value is None or not len(run.loggers) or run.results.is_muted:
        return
    options: dict[str, Any] = {}
    if method == "log_image":
        value = pixels_of(value, key)
        options["caption"] = captions_of(caption, len(value))
    elif method == "log_histogram":
        value = histogram_of(value, bins)
    else:
        figure_of(value)
    run.loggers.show(method, key, value, run.log_step, **options)


def histograms(
    ranks: Ranks,
    tensors: Mapping[str, Tensor],
    visit: Callable[[Look], None],
    bins: int | Sequence[float],
) -> dict[str, Histogram]:
    """Return the histograms of ``tensors`` by name, without tensors that have no finite value. Every rank must call
    this function with the same names. See [Note: histograms of shards].

    Args:
        tensors: tensors that determine which rank counts which values.
        visit: calls its argument with each of these tensors and this rank's values of it, such as its gradient. It is
            called twice.
    """
    own = [_first_with(each, ranks) for each in tensors.values()]  # a stage stores some of the tensors
    first = [min(of_ranks) for of_ranks in zip(*ranks.gather(own), strict=True)]
    index = {each: i for i, each in enumerate(tensors.values()) if own[i] == first[i] and _is_first_copy(each)}
    extents: dict[int, Tensor] = {}
    counts: dict[int, Tensor] = {}

    def measure(tensor: Tensor, values: Tensor) -> None:
        if tensor in index:
            extents[index[tensor]] = extent_of(values)

    visit(measure)
    largest = torch.full((len(tensors), 2), -torch.inf, dtype=torch.float64)  # of the negative values and the values
    for i, extent in extents.items():
        largest[i] = extent.cpu().double() * torch.tensor([-1.0, 1.0])
    largest = ranks.max(largest)
    edges = [
        edges_of(-negative, value, bins, tensor.dtype)
        for (negative, value), tensor in zip(largest.tolist(), tensors.values(), strict=True)
    ]

    def count_here(tensor: Tensor, values: Tensor) -> None:
        if tensor in index:
            counts[index[tensor]] = count(values, edges[index[tensor]])

    visit(count_here)
    total = torch.zeros(len(tensors), max((len(each) - 1 for each in edges), default=0), dtype=torch.int64)
    for i, here in counts.items():
        total[i] = here.cpu()
    found = zip(tensors, ranks.sum(total).tolist(), edges, strict=True)
    return {name: Histogram(row, its_edges) for name, row, its_edges in found if any(row)}


def _first_with(tensor: Tensor, ranks: Ranks) -> int:
    """Return the first of the ranks that store ``tensor`` together with this rank. A rank stores a full tensor
    alone."""
    if is_sharded(tensor):
        return int(tensor.device_mesh.mesh.min())
    return ranks.world.size if tensor.is_meta else ranks.world.rank


def _is_first_copy(tensor: Tensor) -> bool:
    if not is_sharded(tensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return not any(at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
