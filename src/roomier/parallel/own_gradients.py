"""Every rank holds the whole model and keeps the gradients of its own batches: the optimizer does what ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from roomier.core.errors import TrainingError
from roomier.core.ranks import Ranks
from roomier.parallel.agree import take_values_of_rank_zero
from roomier.parallel.runner import StepRunner

NORMS_WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d)


class OwnGradients:
    """What :class:`roomier.engine.parallel.Parallel` asks for, without a collective in the backward (1-bit Adam).

    Args:
        network: whole, and equal on all ranks.

    Attributes:
        runner: calls steps.
        loss_factor: the number of ranks: the optimizer averages over them.
    """

    allows_inference_mode = True
    trace = 0  # each rank runs what it likes
    late_parameters: Sequence[nn.Parameter] = ()

    def __init__(self, network: nn.Module, ranks: Ranks) -> None:
        take_values_of_rank_zero(network, ranks)
        self.runner: nn.Module = StepRunner(network)
        self.loss_factor = float(ranks.world.size)
        norms = [each for each in network.modules() if isinstance(each, NORMS_WITH_STATISTICS)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Before the forward of each micro-batch of a step."""

    def begin_backward(self) -> None:
        """Before each backward."""

    def end_backward(self) -> None:
        """After each backward."""

    def end_update(self) -> None:
        """Running statistics are those of rank 0, as under DDP; all else is the same on all ranks already."""
        for buffer in self._statistics:
            dist.broadcast(buffer, src=0)

    def release(self) -> None:
        """Nothing is gathered."""

    def trained_parameters_changed(self) -> None:
        """The optimizer averages what it has."""

    def clip_grad_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        _refuse_to_clip(max_norm)

    def clip_grad_value_(self, parameters: Sequence[Tensor], max_value: float) -> None:
        _refuse_to_clip(max_value)

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        _refuse_to_clip(None)


def _refuse_to_clip(bound: float | None) -> NoReturn:
    problem = "no rank has the gradient of the whole batch: onebit_adam sends signs of the momentum"
    raise TrainingError("gradient_clip_val", bound, problem, "Do not clip, or use optimizer='adamw'")
