"""Broadcast of parameters and buffers from rank 0, so that all ranks start with the same model."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn

from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks


@torch.no_grad()
def take_values_of_rank_zero(network: nn.Module, ranks: Ranks) -> None:
    """Overwrite the parameters and buffers of ``network`` in place with the values from rank 0.

    If the random number generators were not seeded, the ranks initialize the model with different values. Sharding
    would then combine shards of different models. Tensors on the meta device have no values and are skipped. Sharded
    tensors are also skipped.

    Args:
        network: model with the same parameters and buffers on every rank.
        ranks: all ranks of the run.

    Raises:
        RoomierError: a rank has parameters or buffers with other names, shapes or dtypes than rank 0.
    """
    tensors = list(itertools.chain(network.named_parameters(), network.named_buffers()))
    own = [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors]
    differing = sorted({*own} ^ {*ranks.from_zero(own)})
    for rank, found in enumerate(ranks.gather(differing)):
        if found:
            problem = f"rank {rank} built a different model than rank 0. {len(found)} tensors differ"
            action = "Build the same model on every rank, independently of the rank"
            raise RoomierError("model", found[0], problem, action)
    for _, tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
            continue
        values = tensor.contiguous()
        dist.broadcast(values, src=0)
        if values is not tensor:
            tensor.copy_(values)
