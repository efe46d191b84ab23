"""All ranks begin with the same model."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import nn

from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks


@torch.no_grad()
def take_values_of_rank_zero(network: nn.Module, ranks: Ranks) -> None:
    """Give the parameters and buffers of ``network`` the values they have on rank 0, in place.

    Ranks that cut a model keep a part each of their own values: where these differ, because the random numbers were not
    seeded, the whole would be the model of no rank. What is on ``meta`` has no values, and what is cut is left.

    Raises:
        RoomierError: the model of a rank has other parameters or buffers.
    """
    tensors = list(itertools.chain(network.named_parameters(), network.named_buffers()))
    _check_same([f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors], ranks)
    for _, tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
            continue
        values = tensor.contiguous()
        dist.broadcast(values, src=0)
        if values is not tensor:
            tensor.copy_(values)


def _check_same(own: list[str], ranks: Ranks) -> None:
    of_zero = ranks.from_zero(own)
    differing = sorted({*own} ^ {*of_zero})
    for rank, found in enumerate(ranks.gather(differing)):
        if found:
            problem = f"rank {rank} built another model than rank 0: {len(found)} of their tensors differ"
            action = "Build the same model on every rank: what differs among them must not depend on the rank"
            raise RoomierError("model", found[0], problem, action)
