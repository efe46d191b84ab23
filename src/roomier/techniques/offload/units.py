"""Units: groups of parameters whose states leave the device and return together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from roomier.core.sharded import local_part


@dataclass(frozen=True)
class Unit:
    """Parameters that are updated together.

    Attributes:
        parameters: parameters of the unit, which belong to no other unit.
        module: the block that contains all these parameters. Its forward pass reads the parameters before any other
            code in a step. None for parameters outside the blocks.
    """

    parameters: tuple[nn.Parameter, ...]
    module: nn.Module | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements on this rank."""
        return sum(num_local(each) for each in self.parameters)


def num_local(parameter: Tensor) -> int:
    """Return the number of elements of this rank's shard of ``parameter``."""
    return local_part(parameter.detach()).numel()


def units_of(parameters: Iterable[nn.Parameter], modules: Sequence[nn.Module], apart: Iterable[Tensor]) -> list[Unit]:
    """Return the units of ``parameters``: first the units outside ``modules``, then one unit for each module.

    Parameters outside the modules form units that are at most as large as the largest module, unless a single parameter
    is larger.

    Args:
        parameters: the parameters that the optimizers update.
        modules: modules that share no parameter with code outside them, in the order of their forward passes.
        apart: parameters that do not belong to the unit of their module.
    """
    left = dict.fromkeys(parameters)
    separate = set(apart)
    inside: list[Unit] = []
    for module in modules:
        own = tuple(each for each in module.parameters() if each in left and each not in separate)
        if own:
            inside.append(Unit(own, module))
        for each in own:
            del left[each]
    limit = max((unit.num_elements for unit in inside), default=0)
    outside: list[list[nn.Parameter]] = []
    room = 0
    for parameter in left:
        size = num_local(parameter)
        if not outside or size > room:
            outside.append([])
            room = limit
        outside[-1].append(parameter)
        room -= size
    return [*(Unit(tuple(each)) for each in outside), *inside]


def units_around(regions: Iterable[Sequence[nn.Parameter]], parameters: Sequence[nn.Parameter]) -> list[Unit]:
    """Return the units of ``parameters``: one unit for the parameters outside ``regions``, then one for each region.

    Args:
        regions: groups of parameters, in the expected order of the forward passes that use them. The parameters of a
            group leave the device together.
    """
    left = dict.fromkeys(parameters)
    inside = [Unit(tuple(each for each in region if each in left)) for region in regions]
    for unit in inside:
        for each in unit.parameters:
            del left[each]
    return [*([Unit(tuple(left))] if left else []), *(unit for unit in inside if unit.parameters)]


def first_leaving(sizes: Sequence[int], share: float) -> int:
    """Return the number of the first unit that leaves the device. All later units also leave the device. The total size
    of these units is as close as possible to the fraction ``share`` of the size of all units.

    The first units remain on the device, because the next step needs them first.

    Args:
        sizes: size of each unit in bytes.
        share: fraction of the total size that leaves the device, from 0 to 1.
    """
    wanted, taken, first = share * sum(sizes), 0, len(sizes)
    while first and abs(taken + sizes[first - 1] - wanted) <= abs(taken - wanted) and taken < wanted:
        first -= 1
        taken += sizes[first]
    return first
