"""The collectives of a training step without computation, on buffers with the sizes of a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.memory.weights import Unit
from roomier.parallel.collectives import PairwiseAllGather, PairwiseReduceScatter, Reductions

_BUCKET_BYTES = 25 * 2**20  # default of torch's DDP


def time_collectives(units: list[Unit]) -> dict[str, float]:
    """Return the seconds of each kind of collective for one step. Every rank calls this function.

    Returns:
        ``all_reduce_s``: all gradients in the dtype of the weights, in the buckets of DDP. ``all_gather_s`` and
        ``reduce_scatter_s``: one collective per unit, with the algorithms of the sharded strategies.
        ``gloo_all_gather_s`` and ``gloo_reduce_scatter_s``: the same collectives with gloo's algorithms.
    """
    gradients = torch.zeros(sum(math.prod(each.shape) for unit in units for each in unit.weights))
    buckets = torch.split(gradients, _BUCKET_BYTES // gradients.itemsize)
    wholes = [_padded(unit) for unit in units]
    group = dist.group.WORLD
    assert group is not None
    gather, scatter = PairwiseAllGather(), PairwiseReduceScatter(Reductions(), may_wait=False)
    own = [each.chunk(group.size())[group.rank()].clone() for each in wholes]

    def reduce_scatter() -> None:
        for whole, part in zip(wholes, own, strict=True):
            scatter(part, whole, group, dist.ReduceOp.SUM)

    return {
        "all_reduce_s": _seconds(lambda: [dist.all_reduce(each) for each in buckets]),
        "all_gather_s": _seconds(lambda: [gather(*each, group).wait() for each in zip(wholes, own, strict=True)]),
        "reduce_scatter_s": _seconds(reduce_scatter),
        "gloo_all_gather_s": _seconds(
            lambda: [dist.all_gather_into_tensor(*each) for each in zip(wholes, own, strict=True)]
        ),
        "gloo_reduce_scatter_s": _seconds(
            lambda: [dist.reduce_scatter_tensor(part, whole) for whole, part in zip(wholes, own, strict=True)]
        ),
    }


def _padded(unit: Unit) -> Tensor:
    num_ranks = dist.get_world_size()
    num_elements = sum(
        math.ceil(each.shape[0] / num_ranks) * num_ranks * math.prod(each.shape[1:]) for each in unit.weights
    )
    return torch.zeros(num_elements, dtype=unit.gathered_dtype)


def _seconds(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
