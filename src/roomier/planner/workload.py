"""What a plan is made for: a module and one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roomier.api.adapt import as_module
from roomier.api.blocks import find_blocks
from roomier.api.kept_weights import KeptWeights
from roomier.api.module import Module
from roomier.api.wrapped import network_of
from roomier.core.errors import RoomierError
from roomier.core.tree import batch_size_of, map_tensors
from roomier.planner.fake import known_values

if TYPE_CHECKING:
    from roomier.plan import Plan
    from roomier.planner.dry_runs.dry_run import Stretch


@dataclass(frozen=True)
class Workload:
    """A module, and a micro-batch it is trained on. Shapes count, not values: both may be on ``meta``. Of small tensors
    of whole numbers the values count where they are there: lengths of sequences and masks decide on shapes.

    Args:
        module: never changed, and never run: copies of its shapes are.
        batch: as the loader gives it.
        batch_size: samples of ``batch``, along dimension 0 of its tensors.
        activation_factor: how many times what is forecast of its activations and temporaries they are, as a run of it
            taught: see :mod:`roomier.planner.measured.calibrated`.
        copies: of the weights, which callbacks of the run keep.

    Raises:
        RoomierError: the module optimizes by hand: what its step does is not known before it runs.
    """

    module: Module
    batch: Any
    batch_size: int
    activation_factor: float = 1.0
    copies: tuple[KeptWeights, ...] = ()

    def __post_init__(self) -> None:
        if not self.module.automatic_optimization:
            problem = "optimizes by hand (automatic_optimization=False): what a step does is known when it runs"
            raise RoomierError("model", type(self.module).__name__, problem, "Name a strategy, and measure a step")

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> Workload:
        """``model``, as ``Trainer.fit`` takes it, and ``batch`` as shapes, with as many samples as its first tensor has
        rows."""
        return cls(as_module(model), map_tensors(_shape_of, batch), batch_size_of(batch))

    def with_batch_size(self, batch_size: int) -> Workload:
        """The same with micro-batches of ``batch_size`` samples."""

        def resized(tensor: Tensor) -> Tensor:
            if not (tensor.dim() > 0 and tensor.shape[0] == self.batch_size):
                return tensor
            if known_values.is_kept(tensor):
                return tensor[torch.arange(batch_size) % self.batch_size]
            return tensor.new_empty((batch_size, *tensor.shape[1:]))

        return replace(self, batch=map_tensors(resized, self.batch, makes_anew=True), batch_size=batch_size)

    def calibrated(self, stretches: tuple[Stretch, ...], plan: Plan) -> tuple[Stretch, ...]:
        """A step of it, as forecast under ``plan``, with the activations that a run taught. A budget of activations is
        kept by measuring, so nothing is to be learned there."""
        if self.activation_factor == 1 or plan.activation.policy == "budget":
            return stretches
        return tuple(each.with_activations(self.activation_factor) for each in stretches)

    @cached_property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks of the module, see :func:`roomier.api.blocks.find_blocks`."""
        return tuple(find_blocks(network_of(self.module)))

    @property
    def num_parameters(self) -> int:
        return sum(each.numel() for each in network_of(self.module).parameters())


def _shape_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone() if known_values.is_kept(tensor) else torch.empty_like(tensor, device="meta")
