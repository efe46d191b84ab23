"""Averages of weights over the steps of a training run, on plain tensors and on parts of tensors that are cut.

An average is taken element by element, so each rank averages its own part and tells nobody. Weights of 16 bits are
averaged in float32: 0.001 of a difference is below what bfloat16 can add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from roomier.core import torch_private
from roomier.optim.local import is_cut, local

AverageOne = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(average, weight, number of weights averaged before)`` -> the new average, as ``avg_fn`` of
``torch.optim.swa_utils.AveragedModel``."""

AverageAll = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], None]
"""The same on lists, in place: ``multi_avg_fn``."""


@torch.no_grad()
def average_into(averages: Sequence[Tensor], tensors: Sequence[Tensor], weight: float) -> None:
    """``average += weight * (tensor - average)`` for each pair, in place.

    With ``weight = 1 / (n + 1)`` for the n-th of equally weighted iterates it is their mean (Polyak and Juditsky 1992,
    "Acceleration of Stochastic Approximation by Averaging"); with ``weight = 1 - decay`` the exponential moving average
    ``decay * average + (1 - decay) * tensor``.

    Args:
        averages: floating point, on any device; cut as its tensor where that is cut.
        tensors: of the same shapes.
        weight: of the new tensor, in [0, 1].
    """
    own: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for average, tensor in zip(averages, tensors, strict=True):
        part, goal = local(average), local(tensor)
        if goal.device != part.device or goal.dtype != part.dtype:  # one at a time: no second copy of all
            part.lerp_(goal.to(part), weight)
            continue
        parts, goals = own.setdefault((part.device, part.dtype), ([], []))
        parts.append(part)
        goals.append(goal)
    for parts, goals in own.values():
        torch_private.draw_each_towards(parts, goals, weight)


class WeightAverage:
    """The average of named tensors, held beside them.

    Args:
        tensors: parameters and buffers by name; the objects are kept, and read at each update.
        device: where the average is held; None: beside each tensor.

    Attributes:
        averages: by name, each with the values of its tensor until the first update. What is cut among ranks has an
            average that is this rank's part alone.
        num_averaged: updates so far.
        is_swapped: the tensors have the values of the average now.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self.averages: dict[str, Tensor] = {}
        self.num_averaged = 0
        self.is_swapped = False
        self._kept: dict[str, Tensor] = {}
        self.join(tensors)

    @property
    def names(self) -> list[str]:
        return list(self.averages)

    @torch.no_grad()
    def join(self, tensors: Mapping[str, Tensor]) -> None:
        """Average these as well: so far, the average of one that was not trained before is what it is. One that is
        known may be another object by now."""
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
        """Take in what the tensors are now; the first time the average becomes a copy of them.

        Args:
            weight: of the new weights; None counts all iterates alike.
            average_one, average_all: functions of the user in place of ``weight``.
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
        """Go on from these averages, whole or cut as the tensors are."""
        for name, average in self.averages.items():
            if name in values:
                average.copy_(part_like(self._tensors[name], values[name]))

    @torch.no_grad()
    def swap(self) -> None:
        """Give the tensors the values of the average, and keep theirs; or the other way round, bit for bit.

        One tensor at a time is held twice; of weights of 16 bits, whose average has more, a copy is kept.
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
        """The average, as far as tensors of the model's dtype hold it, as a checkpoint wants it: what is cut among
        ranks knows what it is a part of."""
        if self.is_swapped:
            return {name: self._tensors[name].detach() for name in self.averages}
        return {name: _whole_of(self._tensors[name], self._rounded(name)) for name in self.averages}

    def current(self) -> dict[str, Tensor]:
        """The weights that are trained, in the same way."""
        if not self.is_swapped:
            return {name: self._tensors[name].detach() for name in self.averages}
        held = {**self.averages, **self._kept}
        return {name: _whole_of(self._tensors[name], value) for name, value in held.items()}

    def wide(self) -> dict[str, Tensor]:
        """Averages that have more digits than their tensors, in the same way."""
        return {
            name: _whole_of(self._tensors[name], each) for name, each in self.averages.items() if self.is_wide(name)
        }

    def is_wide(self, name: str) -> bool:
        """Whether the average has digits that its tensor has no room for."""
        return self.averages[name].dtype != self._tensors[name].dtype

    def _rounded(self, name: str) -> Tensor:
        return self.averages[name].to(self._tensors[name].dtype)


def part_like(tensor: Tensor, value: Tensor) -> Tensor:
    """This rank's part of ``value``, which is whole or cut as ``tensor`` is."""
    if is_cut(value) or not is_cut(tensor):
        return local(value)
    from torch.distributed.tensor import distribute_tensor  # slow to import; who cut a tensor has done so

    placed = value.to(tensor.to_local().device)
    return local(distribute_tensor(placed, tensor.device_mesh, tensor.placements, src_data_rank=None))


def _whole_of(tensor: Tensor, part: Tensor) -> Tensor:
    if not is_cut(tensor):
        return part
    from torch.distributed.tensor import DTensor  # slow to import; who cut a tensor has done so

    placed = part.to(tensor.to_local().device)
    return DTensor.from_local(
        placed, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def tensors_to_average(
    parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]] = ()
) -> dict[str, Tensor]:
    """What of a model changes and has an average: parameters that are trained, and buffers, of floating point."""
    trained = {name: each for name, each in parameters if each.requires_grad and each.is_floating_point()}
    return {**trained, **{name: each for name, each in buffers if each.is_floating_point()}}
