"""The input of the planner: a module and one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from roomier.api.adapt import as_module
from roomier.api.blocks import find_blocks
from roomier.api.callback import KeptWeights
from roomier.api.module import Module, network_of
from roomier.core.errors import RoomierError
from roomier.core.tree import batch_size_of, map_tensors
from roomier.planner.fake import known_values


@dataclass(frozen=True)
class Workload:
    """A module and one of its micro-batches.

    Only shapes are used, so the module and the micro-batch may be on ``meta``. Small integer tensors retain their
    values, because shapes can depend on sequence lengths and masks.

    Args:
        module: module to plan for. It is neither run nor modified, because dry runs use copies with the same shapes.
        batch: micro-batch in the form that the loader yields.
        batch_size: number of samples in ``batch``, along dimension 0 of its tensors.
        copies: copies of the weights that callbacks of the run hold, such as averages.
        traces: traces of the step for pipelines, by precision and batch size. They are added on demand.

    Raises:
        RoomierError: the module uses manual optimization, so the operations of a step cannot be determined in advance.

    Example:
        >>> workload = Workload.of(nn.Linear(8, 2), (torch.empty(4, 8), torch.empty(4, dtype=torch.long)))
        >>> workload.batch_size
        4
    """

    module: Module
    batch: Any
    batch_size: int
    copies: tuple[KeptWeights, ...] = ()
    traces: dict[tuple[str, int], Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.module.automatic_optimization:
            problem = "uses manual optimization, so the content of a step is unknown before it runs"
            raise RoomierError("model", type(self.module).__name__, problem, "Set a strategy, and measure a step")

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> Workload:
        """Return the workload of ``model``, which can have any form that ``Trainer.fit`` accepts, and ``batch``. Only
        their shapes are used.

        The number of samples is the size of dimension 0 of the first tensor in ``batch``.
        """
        return cls(as_module(model), map_tensors(_shape_of, batch), batch_size_of(batch))

    def with_batch_size(self, batch_size: int) -> Workload:
        """Return this workload with micro-batches of ``batch_size`` samples."""

        def resized(tensor: Tensor) -> Tensor:
            if not (tensor.dim() > 0 and tensor.shape[0] == self.batch_size):
                return tensor
            if known_values.is_kept(tensor):
                return tensor[torch.arange(batch_size) % self.batch_size]
            return tensor.new_empty((batch_size, *tensor.shape[1:]))

        return replace(self, batch=map_tensors(resized, self.batch, reconstructs=True), batch_size=batch_size)

    @cached_property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The blocks of the module; see :func:`roomier.api.blocks.find_blocks`."""
        return tuple(find_blocks(network_of(self.module)))

    @property
    def num_parameters(self) -> int:
        """Total number of elements in all parameters."""
        return sum(each.numel() for each in network_of(self.module).parameters())


def _shape_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone() if known_values.is_kept(tensor) else torch.empty_like(tensor, device="meta")
