"""Strategy without gradient communication in backward. The optimizer communicates instead (1-bit Adam)."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from roomier.core.errors import TrainingError
from roomier.core.ranks import Ranks
from roomier.techniques.parallel.agree import take_values_of_rank_zero
from roomier.techniques.parallel.runner import StepRunner
from roomier.techniques.parallel.unsharded import Unsharded

NORMS_WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d)


class OwnGradients(Unsharded):
    """Implementation of :class:`roomier.engine.parallel.Parallel` without collectives in backward.

    Every rank stores the full model and the gradients of its own batches.

    Args:
        network: unsharded model. Its parameters and buffers are overwritten with the values from rank 0.
        ranks: all ranks of the run.

    Attributes:
        runner: module that runs a step in its ``forward``.
        loss_factor: the number of ranks, because the optimizer averages over the ranks.
    """

    def __init__(self, network: nn.Module, ranks: Ranks) -> None:
        take_values_of_rank_zero(network, ranks)
        self.runner: nn.Module = StepRunner(network)
        self.loss_factor = float(ranks.world.size)
        norms = [each for each in network.modules() if isinstance(each, NORMS_WITH_STATISTICS)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """This method is a no-op, because no rank communicates in forward."""

    def end_backward(self) -> None:
        """This method is a no-op, because gradients are not reduced in backward."""

    def end_update(self) -> None:
        """Copy the running statistics from rank 0, as DDP does. All other tensors are already identical."""
        for buffer in self._statistics:
            dist.broadcast(buffer, src=0)

    def trained_parameters_changed(self) -> None:
        """This method is a no-op, because the optimizer averages all existing gradients."""

    def check_reduced(self, field: str, value: object) -> None:
        problem = (
            "is not supported with onebit_adam, which sends the signs of the momentum and never has the full gradient"
        )
        raise TrainingError(field, value, problem, "Remove it, or use optimizer='adamw'")
