"""Parameters that every rank holds whole beside what is cut among them.

[Note: parameters without a dimension]
A number that a model learns, such as the temperature of CLIP, has no dimension along which it could be cut, and nothing
would be saved. ``fully_shard`` is told to leave it alone: it stays an ordinary parameter, of which each rank has a copy
and updates it. What has to be seen to is its gradient, which is added up here, once a step, as DDP does. DTensor takes
tensors without a dimension as equal on all ranks, so optimizers take both kinds in one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.core import torch_fake


def is_whole(parameter: Tensor) -> bool:
    """Whether ``fully_shard`` cannot cut it."""
    return not parameter.dim()


def cut_parameters(module: nn.Module, *, recurse: bool = True) -> list[nn.Parameter]:
    """The parameters of ``module`` that can be cut."""
    return [each for each in module.parameters(recurse) if not is_whole(each)]


class WholeParameters:
    """The parameters of a network that stay whole: what they are told at each step.

    Args:
        num_shares: what the sum of their gradients over the ranks is divided by.

    Attributes:
        parameters: all of them, trained or not.
    """

    def __init__(self, network: nn.Module, num_shares: int = 1) -> None:
        self.parameters = [each for each in network.parameters() if is_whole(each)]
        self._num_shares = num_shares
        self._kept: dict[nn.Parameter, Tensor] | None = None

    def begin_step(self) -> None:
        """What is left of a step that was broken off is of no use."""
        self._kept = None

    def begin_backward(self) -> None:
        """What is there has been added up already, and must not be once more: it is put aside."""
        if self._kept is not None:  # the first micro-batch did so
            return
        self._kept = {}
        for each in self.parameters:
            if each.grad is not None:
                self._kept[each], each.grad = each.grad, None

    @torch.no_grad()
    def end_step(self) -> None:
        """After the backward of the last micro-batch."""
        trained = sorted((each for each in self.parameters if each.requires_grad), key=_dtype_name)
        for _, group in groupby(trained, _dtype_name):
            self._add_up(list(group))
        for each, kept in (self._kept or {}).items():
            each.grad = kept if each.grad is None else kept.add_(each.grad)
        self._kept = None

    def _add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """The sum over all ranks of their gradients; one that is missing on some counts as zero, on all stays so.

        Gradients of 16 bits travel, and are added up, in float32. On how many ranks each is there travels with them,
        and is looked at, which waits for the device, only where one is missing here.
        """
        values = torch.stack([torch.zeros_like(each) if each.grad is None else each.grad for each in parameters])
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        is_there = torch.ones_like(values)  # made where it is needed: a copy from the host would wait
        for number, each in enumerate(parameters):
            if each.grad is None:
                is_there[number].zero_()
        together = torch.stack([values, is_there])
        dist.all_reduce(together)
        sums, num_with = together[0] / self._num_shares, together[1]
        for number, each in enumerate(parameters):
            if each.grad is not None:
                each.grad.copy_(sums[number])
            elif not torch_fake.is_fake([num_with]) and num_with[number]:
                each.grad = sums[number].to(each.dtype)


def _dtype_name(parameter: nn.Parameter) -> str:
    return str(parameter.dtype)
