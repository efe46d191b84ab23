"""Averages of weights over training steps, for ordinary tensors and for shards.

Averages are elementwise, so each rank averages its shard without communication. The averages of 16-bit weights are
float32. A bfloat16 average would not change if only 0.001 of its difference from the weight were added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from roomier.core import torch_private
from roomier.core.sharded import is_sharded, with_local_part
from roomier.techniques.optim.local import local

AverageOne = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function that computes the new average from ``(average, weight, number of averaged weights)``, like ``avg_fn`` of
``torch.optim.swa_utils.AveragedModel``."""

AverageAll = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], None]
"""A function that updates a list of averages in place, like ``multi_avg_fn`` of ``AveragedModel``."""


@torch.no_grad()
def average_into(averages: Sequence[Tensor], tensors: Sequence[Tensor], weight: float) -> None:
    """Compute ``average += weight * (tensor - average)`` for each pair, in place.

    With ``weight = 1 / (n + 1)`` for iterate ``n`` of several equally weighted iterates, the result is their mean
    (Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"). With ``weight = 1 - decay``,
    the result is the exponential moving average ``decay * average + (1 - decay) * tensor``.

    Args:
        averages: floating-point tensors on any device, with the same sharding as their tensors.
        tensors: tensors with the shapes of ``averages``.
        weight: weight of the new tensor, in [0, 1].
    """
    parts: list[Tensor] = []
    goals: list[Tensor] = []
    for average, tensor in zip(averages, tensors, strict=True):
        part, goal = local(average), local(tensor)
        if goal.device != part.device or goal.dtype != part.dtype:  # copies only one tensor at a time
            part.lerp_(goal.to(part), weight)
        else:
            parts.append(part)
            goals.append(goal)
    torch_private.draw_each_towards(parts, goals, weight)


class WeightAverage:
    """Average of named tensors, stored separately from the tensors.

    Args:
        tensors: parameters and buffers by name; each update reads the current values of these objects.
        device: device of the average; None selects the device of each tensor.

    Attributes:
        averages: averages by name, equal to their tensors until the first update. The average of a sharded tensor
            contains only this rank's shard.
        num_averaged: number of updates.
        is_swapped: whether the tensors currently hold their averages.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self.averages: dict[str, Tensor] = {}
        self.num_averaged = 0
        self.is_swapped = False
        self._kept: dict[str, Tensor] = {}
        self.join(tensors)

    @torch.no_grad()
    def join(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors. The average of a new tensor starts with its current value. If a name is already known, the new
        tensor replaces the previous tensor."""
        for name, tensor in tensors.items():
            self._tensors[name] = tensor
            if name not in self.averages:
                own = local(tensor)
                wide = torch.promote_types(own.dtype, torch.float32)
                self.averages[name] = own.to(device=self._device or own.device, dtype=wide, copy=True)

    @torch.no_grad()
    def update(
        self,
        weight: float | None = None,
        *,
        average_one: AverageOne | None = None,
        average_all: AverageAll | None = None,
    ) -> None:
        """Add the current values of the tensors to the average. The first update copies the values.

        Args:
            weight: weight of the new values; None gives all iterates the same weight.
            average_one, average_all: user functions that replace ``weight``.
        """
        averages = list(self.averages.values())
        tensors = [local(self._tensors[name]) for name in self.averages]
        if self.num_averaged == 0:
            for average, tensor in zip(averages, tensors, strict=True):
                average.copy_(tensor)
        elif average_one is None and average_all is None:
            average_into(averages, tensors, 1 / (self.num_averaged + 1) if weight is None else weight)
        else:
            count = torch.tensor(self.num_averaged)
            near = [tensor.to(average) for average, tensor in zip(averages, tensors, strict=True)]
            if average_all is not None:
                average_all(averages, near, count)
            else:
                assert average_one is not None
                for average, tensor in zip(averages, near, strict=True):
                    average.copy_(average_one(average, tensor, count.to(average.device)))
        self.num_averaged += 1

    @torch.no_grad()
    def take(self, values: Mapping[str, Tensor]) -> None:
        """Load the averages from ``values``, which are unsharded or sharded like the tensors."""
        for name, average in self.averages.items():
            if name in values:
                average.copy_(part_like(self._tensors[name], values[name]))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values of the tensors and their averages, bit for bit. A second call reverses the exchange. Only
        one tensor at a time is duplicated. 16-bit weights are an exception: their averages have more bits, so copies of
        these weights are kept until the second call.
        """
        for name, average in self.averages.items():
            tensor = local(self._tensors[name])
            if name in self._kept:
                tensor.copy_(self._kept.pop(name))
                continue
            own = tensor.to(average.device, copy=True)
            tensor.copy_(average)
            if self.is_wide(name):
                self._kept[name] = own
            else:
                average.copy_(own)
        self.is_swapped = not self.is_swapped

    def averaged(self) -> dict[str, Tensor]:
        """Return the average in the dtypes of the model for a checkpoint. Shards are returned as DTensors."""
        if self.is_swapped:
            return {name: self._tensors[name].detach() for name in self.averages}
        return self._as_stored((name, each.to(self._tensors[name].dtype)) for name, each in self.averages.items())

    def current(self) -> dict[str, Tensor]:
        """Return the trained weights in the same form as :meth:`averaged`."""
        if not self.is_swapped:
            return {name: self._tensors[name].detach() for name in self.averages}
        return self._as_stored({**self.averages, **self._kept}.items())

    def wide(self) -> dict[str, Tensor]:
        """Return the averages that have more bits than their tensors, in the same form as :meth:`averaged`."""
        return self._as_stored((name, each) for name, each in self.averages.items() if self.is_wide(name))

    def _as_stored(self, values: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: _full_tensor_of(self._tensors[name], each) for name, each in values}

    def is_wide(self, name: str) -> bool:
        """Return True if the average has more bits than its tensor."""
        return self.averages[name].dtype != self._tensors[name].dtype


def part_like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return this rank's shard of ``value``, which is unsharded or sharded like ``tensor``."""
    if is_sharded(value) or not is_sharded(tensor):
        return local(value)
    from torch.distributed.tensor import distribute_tensor  # slow import, already done if a tensor is sharded

    placed = value.to(tensor.to_local().device)
    return local(distribute_tensor(placed, tensor.device_mesh, tensor.placements, src_data_rank=None))


def _full_tensor_of(tensor: Tensor, part: Tensor) -> Tensor:
    return with_local_part(tensor, part.to(tensor.to_local().device) if is_sharded(tensor) else part)


def tensors_to_average(
    parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]] = ()
) -> dict[str, Tensor]:
    """Return the floating-point tensors of a model that change in training: trained parameters and buffers."""
    trained = {name: each for name, each in parameters if each.requires_grad and each.is_floating_point()}
    return {**trained, **{name: each for name, each in buffers if each.is_floating_point()}}
