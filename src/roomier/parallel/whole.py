"""Parameters that every rank holds whole beside what is cut among them.

[Note: parameters without a dimension]
A number that a model learns, such as the temperature of CLIP, has no dimension along which it could be cut, and nothing
would be saved. ``fully_shard`` is told to leave it alone: it stays an ordinary parameter, of which each rank has a copy
and updates it. What has to be seen to is its gradient, which is added up here, once a step, as DDP does. DTensor takes
tensors without a dimension as equal on all ranks, so optimizers take both kinds in one list.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from roomier.core.errors import TrainingError
from roomier.core.ranks import Ranks
from roomier.parallel.average import add_up_gradients, fill_missing_gradients


def is_whole(parameter: Tensor) -> bool:
    """Whether ``fully_shard`` cannot cut it."""
    return not parameter.dim()


def cut_parameters(module: nn.Module, *, recurse: bool = True) -> list[nn.Parameter]:
    """The parameters of ``module`` that can be cut."""
    return [each for each in module.parameters(recurse) if not is_whole(each)]


class WholeParameters:
    """The parameters of a network that stay whole: what they are told at each step.

    Args:
        by_hand: gradients are the mean over the ranks, not their sum.
        finds_unused: a step may leave out some of them, others on other ranks.

    Attributes:
        parameters: all of them, trained or not.
    """

    def __init__(self, network: nn.Module, ranks: Ranks, *, by_hand: bool, finds_unused: bool) -> None:
        self.parameters = [each for each in network.parameters() if is_whole(each)]
        self._network = network
        self._ranks = ranks
        self._num_shares = ranks.world.size if by_hand else 1
        # The optimizers of a training step that runs its own backward have their turns.
        self._looks_each_time = by_hand or finds_unused
        self._complete: list[int] = []  # ids of those that get a gradient in each step, on every rank
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
        """After the backward of the last micro-batch.

        Raises:
            TrainingError: one got no gradient, and got one before.
        """
        trained = [each for each in self.parameters if each.requires_grad]
        if trained:
            add_up_gradients(self._with_gradient(trained), self._num_shares)
        for each, kept in (self._kept or {}).items():
            each.grad = kept if each.grad is None else kept.add_(each.grad)
        self._kept = None

    def _with_gradient(self, trained: list[nn.Parameter]) -> list[nn.Parameter]:
        """Those of ``trained`` that have a gradient, the same on every rank.

        To ask all ranks waits for the device, so they are asked in the first step, and then where that step left out
        some.
        """
        ids = [id(each) for each in trained]
        if self._looks_each_time or ids != self._complete:
            used, is_unused = fill_missing_gradients(trained, self._ranks)
            self._looks_each_time |= is_unused
            self._complete = ids
            return used
        left_out = [each for each in trained if each.grad is None]
        if left_out:
            raise self._left_out(left_out)
        return trained

    def _left_out(self, parameters: Iterable[nn.Parameter]) -> TrainingError:
        names = {parameter: name for name, parameter in self._network.named_parameters()}
        problem = f"got no gradient in this step on rank {dist.get_rank()}, and got one in the first"
        action = "Tell that steps leave out parameters: set find_unused_parameters in the strategy"
        return TrainingError("training_step", [names[each] for each in parameters][:5], problem, action)
