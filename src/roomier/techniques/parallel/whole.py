"""Parameters that are not sharded and that every rank stores in full.

[Note: parameters without a dimension]
A learned scalar, such as the temperature of CLIP, has no dimension that could be sharded, and sharding would save no
memory. A learned scalar is excluded from ``fully_shard`` and remains an ordinary parameter, which each rank updates.
This module sums the gradient of each such parameter over the ranks once per step, as DDP does. DTensor treats tensors
without a dimension as replicated, so optimizers accept sharded and unsharded parameters in one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.core import torch_fake


def is_whole(parameter: Tensor) -> bool:
    """Return whether ``parameter`` has no dimension. ``fully_shard`` cannot shard such a parameter."""
    return not parameter.dim()


def sharded_parameters(module: nn.Module, *, recurse: bool = True) -> list[nn.Parameter]:
    """Return the parameters of ``module`` that can be sharded."""
    return [each for each in module.parameters(recurse) if not is_whole(each)]


class WholeParameters:
    """The unsharded parameters of a network, with the methods that :class:`Shards` calls in each step.

    Args:
        network: model before it is sharded.
        num_shares: number by which the sum of the gradients over the ranks is divided.

    Attributes:
        parameters: all unsharded parameters, trained or frozen.
    """

    def __init__(self, network: nn.Module, num_shares: int = 1) -> None:
        self.parameters = [each for each in network.parameters() if is_whole(each)]
        self._num_shares = num_shares
        self._kept: dict[nn.Parameter, Tensor] | None = None

    def begin_step(self) -> None:
        """Discard the gradients that remain after an interrupted step."""
        self._kept = None

    def begin_backward(self) -> None:
        """Move existing gradients out of ``grad``, because they are already summed over the ranks."""
        if self._kept is not None:  # the first micro-batch already stored the gradients
            return
        self._kept = {}
        for each in self.parameters:
            if each.grad is not None:
                self._kept[each], each.grad = each.grad, None

    @torch.no_grad()
    def end_step(self) -> None:
        """Sum the gradients over the ranks. Call after the backward pass of the last micro-batch."""
        trained = sorted((each for each in self.parameters if each.requires_grad), key=_dtype_name)
        for _, group in groupby(trained, _dtype_name):
            self._add_up(list(group))
        for each, kept in (self._kept or {}).items():
            each.grad = kept if each.grad is None else kept.add_(each.grad)
        self._kept = None

    def _add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of ``parameters``, which have the same dtype, over all ranks.

        A gradient that is missing on some ranks counts as zero. A gradient that is missing on all ranks remains None.
        16-bit gradients are sent and summed in float32. The same collective also counts, for each gradient, the ranks
        that have it. Reading a count synchronizes with the device, so a rank reads only the counts of its missing
        gradients.
        """
        values = torch.stack([torch.zeros_like(each) if each.grad is None else each.grad for each in parameters])
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        has_gradient = torch.ones_like(values)  # created on the device, because a copy from the host would synchronize
        for number, each in enumerate(parameters):
            if each.grad is None:
                has_gradient[number].zero_()
        together = torch.stack([values, has_gradient])
        dist.all_reduce(together)
        sums, num_with = together[0] / self._num_shares, together[1]
        for number, each in enumerate(parameters):
            if each.grad is not None:
                each.grad.copy_(sums[number])
            elif not torch_fake.is_fake([num_with]) and num_with[number]:
                each.grad = sums[number].to(each.dtype)


def _dtype_name(parameter: nn.Parameter) -> str:
    return str(parameter.dtype)
