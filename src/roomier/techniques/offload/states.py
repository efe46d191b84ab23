"""Optimizer states that leave the device between the updates of their unit.

[Note: states away from the device]
The states of a unit are one record of a tier. Before an update, the record is copied to the device, and
``optimizer.state`` contains views of it. After the update, the record is copied to the tier, and ``optimizer.state``
contains tensors on the meta device, so code that reads them fails instead of reading wrong values. Code that reads
``optimizer.state`` between steps, such as the code that saves a checkpoint, must first call
:meth:`OffloadedStates.settle`, which replaces the meta tensors with tensors that are mapped to the records in the tier.
It then reads the tier without a copy in host memory. Tensors without dimensions, such as step counts, stay where the
optimizer created them.

The optimizer creates the states in its first update. The layout of a record is determined after this update, or after a
checkpoint was loaded.

The states of a checkpoint are read into the records in the tier (:meth:`OffloadedStates.place`), so loading requires no
additional memory.

[Note: two records per unit]
A speculative update must be reversible, so each unit has two records. An update reads one record and writes the other,
together with the weights before the update. To accept the speculation, the new record becomes the current record. To
reject it, the weights are copied back, and the old record remains current.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import CheckpointError
from roomier.core.sharded import local_part, with_local_part
from roomier.techniques.offload.staging import Staging


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
    limit = max((sum(map(num_local, unit.parameters)) for unit in inside), default=0)
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


ALIGNMENT = 64
"""Each state in a record starts at a multiple of this number of bytes."""
_MAX_STATES = 8  # a record has room to align this many states of each parameter

States = Mapping[nn.Parameter, dict[str, Any]]


@dataclass(frozen=True)
class _StatePlace:
    """Position of one state in the record of its unit.

    Attributes:
        parameter: parameter to which the state belongs.
        key: name of the state.
        first: index of the first byte.
        last: index after the last byte.
        shape: shape of this rank's shard.
        dtype: dtype of the state.
    """

    parameter: nn.Parameter
    key: str
    first: int
    last: int
    shape: torch.Size
    dtype: torch.dtype

    def away(self) -> Tensor:
        """Return a tensor without data that replaces the state."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def within(self, content: Tensor) -> Tensor:
        """Return the state as a view of the bytes of a record."""
        return content[self.first : self.last].view(self.dtype).view(self.shape)


@dataclass
class _UnitStates:
    """The states of one unit.

    Attributes:
        unit: unit to which the states belong.
        record: the current record.
        spare: the record that a speculative update writes; the current record if updates are not speculative.
        places: positions of the states; empty before the first update.
        content: the record on the device; None while it is in the tier.
        counts: values that the 0-dim states had before a speculative update.
        is_mapped: whether the states are mapped to the record in the tier.
        placed: positions of the states that are read from a checkpoint into the record.
        addresses: addresses of the states in ``placed`` in host memory.
    """

    unit: Unit
    record: int
    spare: int
    places: tuple[_StatePlace, ...] = ()
    content: Tensor | None = None
    counts: tuple[tuple[nn.Parameter, str, Any], ...] = ()
    is_mapped: bool = False
    placed: tuple[_StatePlace, ...] = ()
    addresses: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Total size of the states in bytes."""
        return self.places[-1].last if self.places else 0


def record_bytes(unit: Unit, state_bytes: Mapping[nn.Parameter, int], *, holds_weights: bool) -> int:
    """Return the size of the record of ``unit``.

    Args:
        state_bytes: size in bytes of the states of each parameter on this rank.
        holds_weights: True to include the weights in the record, as speculative updates require.
    """
    weights = [_weight_bytes(each) for each in unit.parameters] if holds_weights else []
    return record_size([state_bytes[each] for each in unit.parameters], weights)


def record_size(state_bytes: Sequence[int], weight_bytes: Sequence[int]) -> int:
    """Return the size of a record that has room for states and weights with these sizes."""
    states = sum(each + _MAX_STATES * ALIGNMENT for each in state_bytes)
    return aligned(states) + sum(map(aligned, weight_bytes))


class OffloadedStates:
    """The states of several units in one tier.

    Args:
        units: all units of the optimized parameters; the number of a unit is its index.
        first: number of the first unit whose states are in the tier. The states of earlier units stay on the device.
        optimizers: optimizers that create and update the states.
        staging: transfer between the tier and the device. The tier has one record per unit. If updates are speculative,
            one additional record per unit follows.
        is_speculative: True for speculative updates, for which each unit has two records.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        first: int,
        optimizers: Sequence[Optimizer],
        staging: Staging,
        *,
        is_speculative: bool,
    ) -> None:
        homes = {
            p: optimizer.state for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
        }
        self._staging = staging
        self._states: dict[nn.Parameter, Any] = {p: homes[p] for unit in units for p in unit.parameters}
        num_leaving = len(units) - first
        self._slots = {
            number: _UnitStates(units[number], number - first, number - first + num_leaving * is_speculative)
            for number in range(first, len(units))
        }

    def expect(self, numbers: Sequence[int]) -> None:
        """Prepare to bring the states of the units with these ``numbers`` to the device, in this order."""
        slots = [self._slots[each] for each in numbers if self.has_states(each)]
        self._staging.expect([slot.record for slot in slots], [slot.num_bytes for slot in slots])

    def has_states(self, number: int) -> bool:
        """Return whether the unit has states in the tier. Before its first update, a unit has no states."""
        return number in self._slots and bool(self._slots[number].places)

    @torch.no_grad()
    def arrive(self, number: int) -> None:
        """Bring the states of a unit to the device."""
        if not self.has_states(number):
            return  # the states stay on the device, or the optimizer creates them there
        slot = self._slots[number]
        slot.content = self._staging.bring(slot.record, slot.num_bytes)
        self._show(slot, slot.content)

    @torch.no_grad()
    def leave(self, number: int, *, is_speculative: bool = False) -> None:
        """Send the states of a unit to the tier, after its update; to the spare record after a speculative update."""
        slot = self._slots.get(number)
        if slot is None:
            return
        self._gather(slot)
        if slot.content is not None:
            self._staging.send(slot.spare if is_speculative else slot.record, slot.content)
            slot.content = None
            self._show(slot, None)

    @torch.no_grad()
    def begin_speculation(self, number: int) -> None:
        """Bring the states of a unit to the device, and keep its weights and counts for :meth:`reject`."""
        slot = self._slots[number]
        self.arrive(number)
        assert slot.content is not None
        for parameter, kept in self._weights_in(slot, slot.content):
            kept.copy_(local_part(parameter))
        slot.counts = tuple(
            (parameter, key, value.clone() if isinstance(value, Tensor) else value)
            for parameter in slot.unit.parameters
            for key, value in self._of(parameter).items()
            if not _leaves(value)
        )

    def accept(self, number: int) -> None:
        """Keep the result of a speculative update."""
        slot = self._slots[number]
        slot.record, slot.spare, slot.counts = slot.spare, slot.record, ()

    @torch.no_grad()
    def reject(self, number: int) -> None:
        """Restore the weights and the states that the unit had before a speculative update."""
        slot = self._slots[number]
        content = self._staging.bring(slot.spare)
        for parameter, kept in self._weights_in(slot, content):
            local_part(parameter).copy_(kept)
        self._staging.drop(content)
        for parameter, key, value in slot.counts:
            now = self._of(parameter)[key]
            if isinstance(now, Tensor):
                now.copy_(value)
            else:
                self._of(parameter)[key] = value
        slot.counts = ()

    @property
    def away(self) -> frozenset[nn.Parameter]:
        """Parameters whose states are in the tier."""
        return frozenset(parameter for slot in self._slots.values() for parameter in slot.unit.parameters)

    def place(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Replace tensors on the meta device with memory in the tier, into which the states of a checkpoint are read.

        Args:
            states: for each parameter, a dict of its states, in which the tensors are replaced.

        Raises:
            CheckpointError: the states do not fit into the tier.
        """
        self._staging.settle()
        for slot in self._slots.values():
            slot.placed = _layout(_leaving(slot.unit, states))
            content = self._staging.mapped(slot.record)
            needed = slot.placed[-1].last if slot.placed else 0
            if needed > len(content):
                problem = (
                    f"the checkpoint has {needed} bytes for a block, but the tier has only {len(content)} bytes for "
                    "this block"
                )
                action = "Create the optimizer with the arguments of the saved run, or load only the weights"
                raise CheckpointError("optimizer states", f"{needed} bytes", problem, action)
            slot.addresses = tuple(place.within(content).data_ptr() for place in slot.placed)
            for place in slot.placed:
                own = states[place.parameter]
                own[place.key] = with_local_part(own[place.key], place.within(content))

    def take_loaded(self) -> None:
        """Adopt the states that were loaded into the optimizers. States that were loaded into the memory that
        :meth:`place` provided are already in the tier. All other states are sent to the tier."""
        for number, slot in self._slots.items():
            found = _leaving(slot.unit, {each: self._of(each) for each in slot.unit.parameters})
            slot.content = None
            if _layout(found) == slot.placed and [each.data_ptr() for *_, each in found] == list(slot.addresses):
                slot.places = slot.placed
                self._show(slot, None)
            else:
                slot.places = ()
                self.leave(number)
            slot.placed, slot.addresses = (), ()

    def settle(self) -> None:
        """Wait until all records are written, and map the states to the records."""
        self._staging.settle()
        for slot in self._slots.values():
            if not slot.is_mapped:
                self._show(slot, self._staging.mapped(slot.record))
                slot.is_mapped = True

    def close(self) -> None:
        """Free the tier. The states remain readable after :meth:`settle`."""
        self._staging.close()

    def _of(self, parameter: nn.Parameter) -> dict[str, Any]:
        found: dict[str, Any] = self._states[parameter].get(parameter, {})
        return found

    def _show(self, slot: _UnitStates, content: Tensor | None) -> None:
        """Set the states of a unit to views of ``content``, or to tensors without data."""
        slot.is_mapped = False
        for place in slot.places:
            states = self._of(place.parameter)
            part = place.away() if content is None else place.within(content)
            states[place.key] = with_local_part(states[place.key], part)

    def _gather(self, slot: _UnitStates) -> None:
        """Write all states of a unit to its record on the device. Determine the layout if the states are new."""
        found = _leaving(slot.unit, {each: self._of(each) for each in slot.unit.parameters})
        if [(p, key, t.shape, t.dtype) for p, key, t in found] != [
            (each.parameter, each.key, each.shape, each.dtype) for each in slot.places
        ]:
            slot.places = _layout(found)
            if found and slot.content is None:
                slot.content = self._staging.blank(slot.record)
        for place, (_, _, tensor) in zip(slot.places, found, strict=True):
            assert slot.content is not None
            target = place.within(slot.content)
            if target.data_ptr() != tensor.data_ptr():
                target.copy_(tensor)

    def _weights_in(self, slot: _UnitStates, content: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        first = len(content)
        for parameter in slot.unit.parameters:
            size = _weight_bytes(parameter)
            first -= aligned(size)
            own = local_part(parameter)
            yield parameter, content[first : first + size].view(own.dtype).view(own.shape)


def _leaves(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _leaving(unit: Unit, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> list[tuple[nn.Parameter, str, Tensor]]:
    """Return this rank's shards of the states that leave the device: parameter, name and shard of each state."""
    return [
        (parameter, key, local_part(value))
        for parameter in unit.parameters
        for key, value in states.get(parameter, {}).items()
        if _leaves(value)
    ]


def _layout(found: Sequence[tuple[nn.Parameter, str, Tensor]]) -> tuple[_StatePlace, ...]:
    places, first = [], 0
    for parameter, key, tensor in found:
        first = aligned(first)
        last = first + tensor.numel() * tensor.itemsize
        places.append(_StatePlace(parameter, key, first, last, tensor.shape, tensor.dtype))
        first = last
    return tuple(places)


def _weight_bytes(parameter: nn.Parameter) -> int:
    return num_local(parameter) * parameter.itemsize


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
