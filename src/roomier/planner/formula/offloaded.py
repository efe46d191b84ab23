"""Model states in lower tiers: bytes on the device, in host memory and on disk, and the traffic of a step.

[Note: units on the device]
While a unit is updated, the optimizer states of the previous unit are copied to the host, and those of the next unit
are copied to the device, so the states of at most three units are on an accelerator. Between two updates, the states of
two units are on the device: those that were copied to the host last, and those of the next unit. A deferred update runs
in the forward pass of the next step, and its gradients exist until then. With sharded parameters, it is complete before
the forward pass of the preceding unit. A speculative update runs at the end of the backward pass of its block.

While a block is computed, its parameters and those of the next block are on the device. In the backward pass, the
gradients of the previous block are on the device, too, because they are being copied to the host. At the end of the
backward pass of a block, its gradients exist twice: as the tensors of autograd and as the record that is copied to the
tier. In an update, the device contains the parameters and gradients of the unit, and the updated parameters of the
previous unit.

On a CPU, units are updated in the buffers of the disk tier, which are the only additional memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from roomier.engine.offload import NUM_BUFFERS
from roomier.plan import OffloadPlan, Plan
from roomier.plan.levers import update_mode
from roomier.planner.forecast import Traffic
from roomier.planner.memory.kinds import Interval, Kind, total_bytes
from roomier.planner.memory.model_states import StateBytes
from roomier.planner.memory.walk import Layout, own_bytes, own_elements, own_shape
from roomier.planner.memory.weights import Weight
from roomier.techniques.offload.regions import ALIGNMENT as PARAMETER_ALIGNMENT
from roomier.techniques.offload.states import aligned, first_leaving, record_size
from roomier.techniques.tiers.buffers import allocated_bytes, buffer_sizes, padded

StateTensors = Callable[[Weight, tuple[int, ...]], Sequence[int]]
"""Function that returns the size in bytes of each optimizer state that is not a scalar, given a weight and the shape of
its shard."""
Group = tuple[str, Sequence[Weight]]
"""A module that is updated as one unit: its name and its weights. The name is empty for the rest of the network."""


@dataclass(frozen=True)
class MovedUnit:
    """Part of a rank's model states that is on the device only while it is in use.

    Attributes:
        place: name of the block; empty for parameters outside the blocks.
        content_bytes: size of the offloaded tensors.
        read_bytes: size of the record without the padding at its end.
        record_bytes: size of the record.
        gradient_bytes: size in bytes of the unit's gradients on this rank.
        cast_bytes: size in bytes of the lower-precision copies of parameters that autocast creates while the unit is on
            the device.
    """

    place: str
    content_bytes: int
    read_bytes: int
    record_bytes: int
    gradient_bytes: int
    cast_bytes: int = 0


@dataclass(frozen=True)
class Offloaded:
    """Model states of one rank in lower tiers.

    Attributes:
        states: units of offloaded optimizer states, in the order of their updates.
        parameters: units of offloaded parameters.
        state_tier: ``"none"``, ``"cpu"`` or ``"disk"``.
        parameter_tier: ``"none"``, ``"cpu"`` or ``"disk"``.
        mode: ``"plain"``, ``"deferred"`` or ``"speculative"``.
        on_cpu: whether the device is the host.
        num_micro_batches: number of micro-batches per optimizer step.
        num_state_buffers: number of buffers for optimizer states on disk.
        completes_ahead: number of units by which deferred updates precede the forward pass.
        gathers_again: whether parameters are all-gathered again in the backward pass.
        in_buckets: whether gradients are in the buckets of DDP. DDP replaces its buckets in its second step, while
            deferred updates still use the earlier buckets.
    """

    states: tuple[MovedUnit, ...] = ()
    parameters: tuple[MovedUnit, ...] = ()
    state_tier: str = "none"
    parameter_tier: str = "none"
    mode: str = "plain"
    on_cpu: bool = True
    num_micro_batches: int = 1
    num_state_buffers: int = OffloadPlan.buffers
    completes_ahead: int = 0
    gathers_again: bool = False
    in_buckets: bool = False

    @property
    def is_used(self) -> bool:
        """True if model states are offloaded."""
        return bool(self.states or self.parameters)

    @property
    def kept_less(self) -> dict[Kind, int]:
        """Bytes of offloaded model states, which are not on the device between two steps, by kind."""
        return {
            Kind.OPTIMIZER_STATE: sum(each.content_bytes for each in self.states),
            Kind.PARAMETER: sum(each.content_bytes for each in self.parameters),
        }

    # ---- lower tiers ----

    @property
    def _num_copies(self) -> int:
        return 2 if self.mode == "speculative" else 1

    @property
    def disk_bytes(self) -> int:
        """Bytes of all records on disk."""
        return self._stored_bytes("disk")

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory: records of the tier ``"cpu"``, and buffers of the tier ``"disk"``. On a CPU, the
        buffers are counted as device memory, so the result is 0."""
        return 0 if self.on_cpu else self._stored_bytes("cpu") + self.buffer_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers for tiers on disk."""
        num_bytes = 0
        if self.state_tier == "disk":
            sizes = [each.record_bytes for each in self.states] * self._num_copies
            num_bytes += sum(buffer_sizes(sizes, self.num_state_buffers))
        if self.parameter_tier == "disk":
            sizes = self._parameter_sizes + self._gradient_sizes
            num_bytes += NUM_BUFFERS * max(map(padded, sizes), default=0)
        return num_bytes

    def _stored_bytes(self, tier: str) -> int:
        pinned = tier == "cpu"
        num_bytes = 0
        if self.state_tier == tier:
            num_bytes += allocated_bytes([each.record_bytes for each in self.states] * self._num_copies, pinned)
        if self.parameter_tier == tier:
            sizes = [size for each in self.parameters for size in (each.record_bytes, each.gradient_bytes)]
            num_bytes += allocated_bytes(sizes, pinned)
        return num_bytes

    @property
    def traffic(self) -> Traffic:
        """Transfers in one step, if no update is repeated."""
        return self.forward_traffic + self.backward_traffic + self.update_traffic

    @property
    def forward_traffic(self) -> Traffic:
        """Transfers in the forward passes of all micro-batches, which read the parameters."""
        return self._moved(self.parameter_tier, self._parameter_sizes * self.num_micro_batches, [])

    @property
    def backward_traffic(self) -> Traffic:
        """Transfers in the backward passes of all micro-batches, which read the parameters and write the gradients.
        From the second micro-batch on, they also read the accumulated gradients."""
        times, gradients = self.num_micro_batches, self._gradient_sizes
        read = self._parameter_sizes * times + gradients * (times - 1)
        return self._moved(self.parameter_tier, read, gradients * times)

    @property
    def update_traffic(self) -> Traffic:
        """Transfers of the updates, which read gradients, and read and write states and parameters. A deferred update
        does not read parameters again, because the next forward pass has read them. The reads of parameters are
        estimates: a region can stay on the device between two uses, and a prefetched region can be discarded."""
        read, written = [each.read_bytes for each in self.states], [each.record_bytes for each in self.states]
        arriving = self._gradient_sizes + (self._parameter_sizes if self.mode == "plain" else [])
        own = self._moved(self.parameter_tier, arriving, self._parameter_sizes)
        return self._moved(self.state_tier, read, written) + own

    @property
    def ring_share(self) -> float:
        """Fraction of the update transfers that fills the buffers of the tier before the first update."""
        updated = self.states or self.parameters
        if self.is_serial:
            return 0.0
        num_buffers = self.num_state_buffers if self.states else NUM_BUFFERS
        return min(1.0, num_buffers / len(updated)) / 2 if updated else 0.0

    @property
    def is_serial(self) -> bool:
        """True if updates wait for all transfers, because the tier has one buffer."""
        return self.state_tier == "disk" and self.num_state_buffers == 1

    @property
    def _parameter_sizes(self) -> list[int]:
        return [each.record_bytes for each in self.parameters]

    @property
    def _gradient_sizes(self) -> list[int]:
        return [each.gradient_bytes for each in self.parameters]

    def _moved(self, tier: str, read: Sequence[int], written: Sequence[int]) -> Traffic:
        traffic = Traffic()
        if not self.on_cpu:
            traffic = replace(traffic, to_device_bytes=sum(read), to_host_bytes=sum(written))
        if tier == "disk":
            of_pages = {"disk_read_bytes": sum(map(padded, read)), "disk_written_bytes": sum(map(padded, written))}
            traffic = replace(traffic, **of_pages)
        return traffic

    # ---- the device ----

    def on_device(self, timeline: Sequence[Interval]) -> tuple[Interval, ...]:
        """Return ``timeline`` with the memory of the units that are on the device; see [Note: units on the device].

        Args:
            timeline: a step in which the offloaded model states are not counted.
        """
        if not self.is_used:
            return tuple(timeline)
        always = {Kind.OPTIMIZER_STATE: self.buffer_bytes if self.on_cpu else self._left_bytes}
        found = [_with(each, always, always, always) for each in timeline]
        found = self._with_gradients(found) if self.on_cpu else self._with_parameters(found)
        if self.mode == "deferred":
            found = self._with_deferred(found)
        elif self.mode == "speculative":
            found = self._with_speculative(found)
        more = max((self._more_at_update(each) for each in self._updated_together), key=total_bytes, default={})
        for index, each in enumerate(found):
            if each.phase == "update":
                found[index] = _with(each, {}, more, {})
        return tuple(found)

    @property
    def _updated_together(self) -> range:
        """Indices of the units that are updated after the backward pass."""
        num_outside = sum(not each.place for each in self.states)
        return range({"plain": len(self.states), "deferred": num_outside, "speculative": 0}[self.mode])

    @property
    def _left_bytes(self) -> int:
        """Bytes of the states that were copied to the host last in a step, and are still on the accelerator."""
        if self.on_cpu or not self.states:
            return 0
        return self.states[0 if self.mode == "speculative" else -1].record_bytes

    def _present(self, first: int, last: int) -> dict[Kind, int]:
        """Return the size in bytes of the states of units ``first`` to ``last``, without :attr:`_left_bytes`; 0 on a
        CPU."""
        units = self.states[max(0, first) : last + 1]
        more = 0 if self.on_cpu else sum(each.record_bytes for each in units) - self._left_bytes
        return {Kind.OPTIMIZER_STATE: more}

    def _more_at_update(self, index: int) -> dict[Kind, int]:
        """Return the size in bytes of the states on the device while a unit is updated, in the form of
        :meth:`_present`. Units are updated in ascending order."""
        found = self._present(index - 1, index + 1)
        return found if index else {kind: each + self._left_bytes for kind, each in found.items()}

    def _with_speculative(self, timeline: Sequence[Interval]) -> list[Interval]:
        """Add the states of the units that are updated when the backward pass of their block ends."""
        found = list(timeline)
        phases = [each.phase for each in found]
        # A dry run can have a short interval of the forward pass at the end of the backward pass.
        last_forward = max((n for n, pair in enumerate(pairwise(phases)) if pair == ("forward", "backward")), default=0)
        of_root = min(each.end.get(Kind.GATHERED, 0) for each in found[last_forward:])
        left = len(self.states)  # index of the last updated unit
        for index, interval in enumerate(found):
            if index <= last_forward or not self.states:
                continue
            own = _inside(interval, self.states)
            now = self._present(left - 1, left) if left < len(self.states) else {}
            in_update = after = now
            if own and own[0] < left:
                left = own[0]
                after, in_update = self._present(left - 1, left), self._present(left - 1, left + 1)
                if left == len(self.states) - 1:
                    in_update = {kind: each + self._left_bytes for kind, each in in_update.items()}
                if self.gathers_again:  # the weights of the next unit, after the update
                    in_update[Kind.GATHERED] = of_root - interval.end.get(Kind.GATHERED, 0)
            found[index] = _with(interval, now, now, max(after, in_update, key=total_bytes))
        return found

    def _with_gradients(self, timeline: Sequence[Interval]) -> list[Interval]:
        """Add the gradients that autograd creates on a CPU before they are copied to a buffer of the tier."""
        found = []
        for interval in timeline:
            own = next(iter(_inside(interval, self.parameters)), None)
            created = self._regions([], [] if own is None or interval.phase != "backward" else [own])
            found.append(_with(interval, {}, {}, created))
        return found

    def _with_parameters(self, timeline: Sequence[Interval]) -> list[Interval]:
        """Add the parameters and gradients that are on an accelerator."""
        if not self.parameters:
            return list(timeline)
        found, left = [], dict[Kind, int]()
        for interval in timeline:
            own = next(iter(_inside(interval, self.parameters)), None)
            begin, end = left, left
            if interval.phase == "update":
                every = range(len(self.parameters)) if self.mode != "deferred" else ()
                begin = max((self._regions([n - 1, n], [n]) for n in every), key=total_bytes, default={})
            elif own is not None and interval.phase == "forward":
                begin = end = self._regions([own, own + 1], [])
                if self.mode == "deferred":
                    begin = max(begin, self._regions([own - 1, own], [own]), key=total_bytes)
            elif own is not None:
                begin = self._regions([own - 1, own], [own + 1])
                end = self._regions([own - 1, own], [own, own])
                left = self._regions([own - 1, own], [own])
            left = end if interval.phase == "forward" else left
            found.append(_with(interval, begin, end if interval.phase == "forward" else begin, end))
        return found

    def _regions(self, parameters: Sequence[int], gradients: Sequence[int]) -> dict[Kind, int]:
        """Return the size in bytes of regions on the device, by kind. Indices of regions that do not exist are
        ignored."""
        present = [self.parameters[n] for n in parameters if 0 <= n < len(self.parameters)]
        with_gradient = [self.parameters[n] for n in gradients if 0 <= n < len(self.parameters)]
        return {
            Kind.PARAMETER: sum(each.record_bytes for each in present),
            Kind.GRADIENT: sum(each.gradient_bytes for each in with_gradient),
            Kind.ACTIVATION: sum(each.cast_bytes for each in present),
        }

    def _with_deferred(self, timeline: Sequence[Interval]) -> list[Interval]:
        """Add the gradients and states of the deferred updates to the first forward pass."""
        first = sum(not each.place for each in self.states)  # deferred updates follow the units outside the blocks
        found, done = list(timeline), first - 1
        for index, interval in enumerate(timeline):
            if interval.phase != "forward" or done == len(self.states) - 1:
                break
            own = _inside(interval, self.states)
            wanted = done if not own else min(own[-1] + self.completes_ahead, len(self.states) - 1)
            if index == 0 and self.completes_ahead:
                wanted = max(wanted, first)
            before = [
                {**self._gradients_of(self.states[number:]), **self._more_at_update(number)}
                for number in range(done + 1, wanted + 1)
            ]
            done = max(done, wanted)
            now = {**self._gradients_of(self.states[done + 1 :]), **self._present(done, done + 1)}
            begin = max([*before, now], key=total_bytes)
            found[index] = _with(interval, begin, now, now)
        return found

    def _gradients_of(self, units: Sequence[MovedUnit]) -> dict[Kind, int]:
        if self.parameters:  # gradients of offloaded parameters are in the tier
            return {}
        held = self.states if self.in_buckets and units else units
        return {Kind.GRADIENT: sum(each.gradient_bytes for each in held)}


def offloaded(
    plan: Plan,
    groups: Sequence[Group],
    layout: Layout,
    state_bytes: StateBytes,
    state_tensors: StateTensors,
    *,
    on_cpu: bool,
    cast_dtype: torch.dtype | None = None,
) -> Offloaded:
    """Return the model states of ``plan`` in lower tiers.

    Args:
        plan: plan with a concrete strategy.
        groups: weights of each module that is updated as one unit, and of the rest of the network.
        layout: how the weights are sharded.
        state_bytes: function that returns the total size in bytes of the states of a weight.
        state_tensors: function that returns the size in bytes of each state of a weight.
        on_cpu: whether the device is the host.
        cast_dtype: dtype of the copies that autocast creates; None without autocast, or if the weights are all-gathered
            in this dtype.
    """
    offload, mode = plan.offload, update_mode(plan)
    states: list[MovedUnit] = []
    parameters: list[MovedUnit] = []
    if offload.optimizer_states != "none":
        trained = [(place, [each for each in unit if each.is_trained]) for place, unit in groups]
        trained = [each for each in trained if each[1]]
        units = _in_units(trained, layout) if offload.parameters == "none" else trained
        of_units = [sum(state_bytes(each, own_shape(each.shape, layout)) for each in unit) for _, unit in units]
        states = [
            _unit_of_states(place, unit, layout, state_bytes, state_tensors, holds_weights=mode == "speculative")
            for place, unit in units[first_leaving(of_units, offload.share) :]
        ]
    if offload.parameters != "none":
        parameters = [_unit_of_parameters(*each, layout, cast_dtype) for each in groups if each[0] and each[1]]
    return Offloaded(
        states=tuple(states),
        parameters=tuple(parameters),
        state_tier=offload.optimizer_states,
        parameter_tier=offload.parameters,
        mode=mode,
        on_cpu=on_cpu,
        num_micro_batches=plan.batch.accumulate_grad_batches,
        num_state_buffers=offload.buffers,
        completes_ahead=int(layout.is_sharded and not (on_cpu and layout.is_sequential)),
        gathers_again=layout.frees_parameters,
        in_buckets=layout.strategy == "ddp",
    )


def _in_units(groups: Sequence[Group], layout: Layout) -> list[Group]:
    """Divide the weights outside the modules into units that are not larger than the largest module, unless a single
    weight is. Return these units, followed by the groups of the modules."""
    limit = max((sum(own_elements(each, layout) for each in unit) for place, unit in groups if place), default=0)
    found: list[tuple[str, list[Weight]]] = []
    room = 0
    for weight in (each for place, unit in groups if not place for each in unit):
        size = own_elements(weight, layout)
        if not found or size > room:
            found.append(("", []))
            room = limit
        found[-1][1].append(weight)
        room -= size
    return [*found, *((place, unit) for place, unit in groups if place)]


def _unit_of_states(
    place: str,
    weights: Sequence[Weight],
    layout: Layout,
    state_bytes: StateBytes,
    state_tensors: StateTensors,
    *,
    holds_weights: bool,
) -> MovedUnit:
    sizes = [size for each in weights for size in state_tensors(each, own_shape(each.shape, layout))]
    starts = [aligned(size) for size in sizes[:-1]]
    with_weights = [own_bytes(each, layout) for each in weights] if holds_weights else []
    record = record_size([state_bytes(each, own_shape(each.shape, layout)) for each in weights], with_weights)
    return MovedUnit(
        place=place,
        content_bytes=sum(sizes),
        read_bytes=sum(starts) + sum(sizes[-1:]),
        record_bytes=record,
        gradient_bytes=sum(own_bytes(each, layout) for each in weights),
    )


def _unit_of_parameters(
    place: str, weights: Sequence[Weight], layout: Layout, cast_dtype: torch.dtype | None
) -> MovedUnit:
    num_bytes = sum(own_bytes(each, layout) for each in weights)
    record = sum(-(-own_bytes(each, layout) // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT for each in weights)
    casts = 0 if cast_dtype is None else sum(own_elements(each, layout) for each in weights) * cast_dtype.itemsize
    return MovedUnit(place, num_bytes, record, record, record, casts)


def _with(
    interval: Interval, before: Mapping[Kind, int], during: Mapping[Kind, int], after: Mapping[Kind, int]
) -> Interval:
    """Return ``interval`` with additional bytes at its start, at its peak and at its end."""
    found = interval.plus(before, during, after)
    return replace(found, peak=max((found.peak, found.begin, found.end), key=total_bytes))


def _inside(interval: Interval, units: Sequence[MovedUnit]) -> list[int]:
    """Return the indices of the blocks in ``units`` that contain the part of the model that runs in ``interval``."""
    place = f"{interval.place}."
    return [number for number, each in enumerate(units) if each.place and place.startswith(f"{each.place}.")]
