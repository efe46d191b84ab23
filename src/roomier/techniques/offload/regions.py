"""Regions: parts of a network whose parameters leave the device together.

A region is a block, or a submodule outside the blocks that contains no block, such as an embedding or an output layer.
Parameters of modules that contain blocks belong to no region and stay on the device, because code outside the forward
pass of a region reads them. Parameters that two regions share belong to the first of these regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from roomier.core.torch_offload import Shard

MIN_BYTES = 2**20
"""By default, the parameters of a module outside the blocks stay on the device if their total size is smaller than this
number of bytes, because a transfer would take longer than the computation of the module."""
ALIGNMENT = 512
"""Parameters start at multiples of this number of bytes. Separately allocated tensors have the same alignment, so torch
selects the same kernels."""


@dataclass(frozen=True)
class Place:
    """Position of a tensor in a storage.

    Attributes:
        first: index of the first byte.
        dtype: dtype of the tensor.
        size: shape of the tensor.
        stride: strides of the tensor in elements.
    """

    first: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor as a view of ``storage``."""
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, self.first // self.dtype.itemsize, self.size, self.stride)


@dataclass(frozen=True, eq=False)
class WholeSlot:
    """A parameter of a region that is not sharded. Its data is replaced when the region is brought to the device or
    leaves the device.

    Attributes:
        parameter: parameter whose data is replaced.
        place: position of the stored tensor in the record of the region.
    """

    parameter: nn.Parameter
    place: Place

    @property
    def content(self) -> Tensor:
        """The stored tensor."""
        return self.parameter.detach()

    def own(self, stored: Tensor) -> Tensor:
        """Return the part of ``stored`` that belongs to the parameter, without padding."""
        return stored

    def show(self, stored: Tensor) -> None:
        """Make ``stored`` the data of the parameter."""
        self.parameter.data = stored

    def leave_meta(self, stored: Tensor) -> None:
        """Move the parameter from the meta device, and make ``stored`` its data."""
        made = nn.Parameter(stored, self.parameter.requires_grad)
        made.__dict__.update(self.parameter.__dict__)
        # The parameter must remain the same object, because other code has references to it.
        torch.utils.swap_tensors(self.parameter, made)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class ShardSlot:
    """A parameter's shard, stored with its padding. See :class:`WholeSlot`."""

    shard: Shard
    place: Place

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter whose data is replaced."""
        return self.shard.parameter

    @property
    def content(self) -> Tensor:
        """The stored tensor, with its padding."""
        return self.shard.padded

    def own(self, stored: Tensor) -> Tensor:
        """Return the part of ``stored`` that belongs to the shard, without padding."""
        return self.shard.within(stored)

    def show(self, stored: Tensor) -> None:
        """Make ``stored`` the data of the shard."""
        self.shard.place(stored, self.own(stored))

    def leave_meta(self, stored: Tensor) -> None:
        """Raise an error, because no sharded parameter is on the meta device."""
        raise AssertionError("a model on the meta device has values before it is sharded")


Slot: TypeAlias = WholeSlot | ShardSlot


@dataclass(frozen=True, eq=False)
class Region:
    """Part of a network whose parameters leave the device together.

    Attributes:
        index: number of the region.
        name: name of the module.
        slots: the offloaded parameters, in the order in which the record stores them.
        num_bytes: size of the record.
    """

    index: int
    name: str
    slots: tuple[Slot, ...]
    num_bytes: int

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that leave the device."""
        return tuple(slot.parameter for slot in self.slots)


def regions_of(
    network: nn.Module, blocks: Sequence[nn.Module], min_bytes: int, stays: Callable[[nn.Module], bool]
) -> list[Region]:
    """Return the regions of ``network``, in the order in which their modules are registered.

    Args:
        blocks: the blocks of the network.
        min_bytes: the parameters of a module outside the blocks stay on the device if their total size is smaller.
        stays: function that returns True for a module if the parameters of the module must stay on the device.
    """
    regions: list[Region] = []
    known: set[nn.Parameter] = set()
    for name, module in _modules_of(network, set(blocks)):
        own = [each for each in dict.fromkeys(module.parameters()) if each not in known and can_leave(each)]
        known.update(own)
        places, num_bytes = layout(own)
        is_large = module in blocks or num_bytes >= min_bytes
        if own and is_large and not any(stays(each) for each in module.modules()):
            slots = tuple(WholeSlot(parameter, place) for parameter, place in zip(own, places, strict=True))
            regions.append(Region(len(regions), name, slots, num_bytes))
    return regions


def large_modules(network: nn.Module, blocks: Sequence[nn.Module], min_bytes: int = MIN_BYTES) -> list[nn.Module]:
    """Return the modules whose parameters form regions, for a forecast. The arguments are the same as in
    :func:`regions_of`."""
    return [
        module
        for _, module in _modules_of(network, set(blocks))
        if module in blocks or sum(each.numel() * each.itemsize for each in module.parameters()) >= min_bytes
    ]


def modules_with(
    network: nn.Module, blocks: Sequence[nn.Module], regions: Sequence[Region]
) -> dict[nn.Module, tuple[Region, ...]]:
    """Return the modules whose forward methods read parameters of ``regions``, with the regions that each of them
    reads."""
    home = {parameter: region for region in regions for parameter in region.parameters}
    found = {}
    for _, module in _modules_of(network, set(blocks)):
        read = tuple(dict.fromkeys(home[each] for each in module.parameters() if each in home))
        if read:
            found[module] = read
    return found


def can_leave(parameter: nn.Parameter) -> bool:
    """Return whether ``parameter`` can be a view of a record, which requires an ordinary, nonempty tensor without
    gaps."""
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.is_quantized:
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return 0 < parameter.numel() == extent


def _modules_of(network: nn.Module, blocks: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks and the largest modules outside the blocks that contain no block, with their names."""
    above = {module for module in network.modules() if not blocks.isdisjoint(module.modules()) and module not in blocks}
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        if module not in above:
            yield name, module
            return
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    yield from walk("", network)


def layout(tensors: Sequence[Tensor]) -> tuple[list[Place], int]:
    """Return the positions of ``tensors`` in a record, and the size of the record in bytes."""
    places, first = [], 0
    for each in tensors:
        places.append(Place(first, each.dtype, each.shape, each.stride()))
        first += -(-each.numel() * each.itemsize // ALIGNMENT) * ALIGNMENT
    return places, first
