"""The collectives of a training step without computation, on buffers with the sizes of a model's weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.device.streams import synchronize
from roomier.planner.memory.weights import Unit
from roomier.techniques.parallel.collectives import PairwiseAllGather, PairwiseReduceScatter, Reductions

_BUCKET_BYTES = 25 * 2**20  # default of torch's DDP


def time_collectives(units: list[Unit], device: torch.device) -> dict[str, float]:
    """Return the seconds that each kind of collective takes in one step. Every rank must call this function.

    Returns:
        ``all_reduce_s``: all-reduce of all gradients in the dtype of the weights, in the buckets of DDP.
        ``all_gather_s`` and ``reduce_scatter_s``: one collective per unit, as in the sharded strategies. On the CPU,
        ``gloo_all_gather_s`` and ``gloo_reduce_scatter_s``: the same collectives with gloo's algorithms.
    """
    with torch.device(device):
        gradients = torch.zeros(sum(math.prod(each.shape) for unit in units for each in unit.weights))
        wholes = [_padded(unit) for unit in units]
    buckets = torch.split(gradients, _BUCKET_BYTES // gradients.itemsize)
    group = dist.group.WORLD
    assert group is not None
    own = [each.chunk(group.size())[group.rank()].clone() for each in wholes]

    def all_gather() -> None:
        for whole, part in zip(wholes, own, strict=True):
            dist.all_gather_into_tensor(whole, part)

    def reduce_scatter() -> None:
        for whole, part in zip(wholes, own, strict=True):
            dist.reduce_scatter_tensor(part, whole)

    found = {"all_reduce_s": _seconds(lambda: [dist.all_reduce(each) for each in buckets], device)}
    backends = _seconds(all_gather, device), _seconds(reduce_scatter, device)
    if device.type != "cpu":
        return {**found, "all_gather_s": backends[0], "reduce_scatter_s": backends[1]}
    gather, scatter = PairwiseAllGather(), PairwiseReduceScatter(Reductions(), may_wait=False)

    def scatter_pairwise() -> None:
        for whole, part in zip(wholes, own, strict=True):
            scatter(part, whole, group, dist.ReduceOp.SUM)

    return {
        **found,
        "all_gather_s": _seconds(
            lambda: [gather(*each, group).wait() for each in zip(wholes, own, strict=True)], device
        ),
        "reduce_scatter_s": _seconds(scatter_pairwise, device),
        "gloo_all_gather_s": backends[0],
        "gloo_reduce_scatter_s": backends[1],
    }


def _padded(unit: Unit) -> Tensor:
    num_ranks = dist.get_world_size()
    num_elements = sum(
        math.ceil(each.shape[0] / num_ranks) * num_ranks * math.prod(each.shape[1:]) for each in unit.weights
    )
    return torch.zeros(num_elements, dtype=unit.gathered_dtype)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start
