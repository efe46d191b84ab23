"""Access to this rank's shard of a tensor, for optimizers with elementwise updates.

An elementwise update requires no communication, so the optimizer processes each shard as an ordinary tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.sharded import is_sharded, local_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ShardOptimizer(Optimizer):
    """Base class of optimizers that update this rank's shard of each parameter. Subclasses define
    :meth:`_update_all`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. If a parameter is sharded, all ranks must call this method
        together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    def _update_all(self) -> None:
        raise NotImplementedError

    def _trained(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """Yield each parameter that has a gradient, with its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter


class NumberedOptimizer(ShardOptimizer):
    """Base class of optimizers whose random numbers depend on the index of a parameter. The index is determined when a
    group is added, because a step during the backward pass processes only some of the parameters."""

    _index: dict[Tensor, int]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and number its parameters."""
        super().add_param_group(param_group)
        self._number(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # torch copies only the defaults, the state and the parameter groups
        self._index = {}
        for group in self.param_groups:
            self._number(group)

    def _number(self, group: Mapping[str, Any]) -> None:
        for parameter in group["params"]:
            self._index[parameter] = len(self._index)


def local(tensor: Tensor) -> Tensor:
    """Return a detached view of this rank's shard of ``tensor``. For an ordinary tensor, return a view of the full
    tensor."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()


def first_element(tensor: Tensor) -> int:
    """Return the flat index of the first element of this rank's shard. The tensor must be sharded in dimension 0."""
    return local_rows(tensor).start * math.prod(tensor.shape[1:]) if tensor.dim() else 0


def shard_group(parameter: Tensor) -> ProcessGroup | None:
    """Return the process group across which ``parameter`` is sharded, or None if it is not sharded."""
    if not is_sharded(parameter):
        return None
    [dim] = [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
    return parameter.device_mesh.get_group(dim)


def sum_over(values: Sequence[Sequence[Tensor]], ranks: ProcessGroup | None) -> Sequence[Sequence[Tensor]]:
    """Return ``values`` (1-dim tensors), summed over the ranks in one collective."""
    if ranks is None:
        return values
    import torch.distributed as dist  # already imported if a tensor is sharded

    joined = torch.cat([each for row in values for each in row])
    dist.all_reduce(joined, group=ranks)
    split = iter(torch.split(joined, [len(each) for row in values for each in row]))
    return [[next(split) for _ in row] for row in values]
