"""Simulation of the units of a model during a step, which records the sizes of the model states.

[Note: when ``fully_shard`` allocates]
A unit is all-gathered into one buffer and copied from this buffer into its parameters. On gloo, the buffer of the next
unit is filled during the computation, because ``techniques/parallel/shard.py`` sets explicit prefetching. On other
backends, the buffer of a unit in the forward pass exists until the next unit has been copied from its own buffer (torch
2.13, ``FSDPParamGroup.wait_for_unshard``). In a backward pass, all backends prefetch the next unit.

After the backward pass of a unit, its parameters are resharded, and its gradients are copied into one buffer and freed.
The reduced shard of this rank is its gradient. On gloo, the shards of the other ranks are received into the result and
into separate buffers, which are freed when the reduction is complete: before the next reduction or, for the last one,
at the end of the backward pass. With sequential communication, each reduction is completed immediately, and no unit is
prefetched. On other backends, the single buffer exists until the next unit requires one. The inputs of the root and of
embeddings have no gradient, so the gradients of these units are reduced at the end of the backward pass of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from roomier.planner.memory.kinds import Kind
from roomier.planner.memory.weights import Unit, Weight

KINDS = tuple(Kind)
NumBytes = tuple[int, ...]
"""Bytes of each kind, in the order of ``KINDS``."""

_PARAMETER, _GATHERED, _GRADIENT, _STATE, _ACTIVATION, _SENT, _TEMPORARY = range(len(KINDS))  # in the order of Kind


@dataclass(frozen=True)
class Layout:
    """Settings of a Plan that determine the sizes of model states.

    Attributes:
        strategy: ``"single"``, ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"`` or ``"hsdp"``.
        num_shards: number of ranks across which one replica is sharded; 1 means no sharding.
        shard: index of this rank's shard. Shard 0 is at least as large as any other shard.
        num_micro_batches: number of micro-batches per optimizer step.
        wire_dtype: dtype in which gradients are sent; None selects the dtype of the computation or of the reduction.
        on_gloo: True if the ranks use the gloo backend, which exchanges shards point to point.
        is_sequential: True if transfers complete before the computation continues.
        steps_in_backward: True if gradients are used and freed during the backward pass.
        reads_in_backward: True if gradients are read during the backward pass but not freed, as in a speculative
        update. num_backwards: number of backward passes per micro-batch. If 2, the first pass computes the gradient
        norm. holds_all_batches: True if all micro-batches of a step are on the device, as on a CPU. Other devices
        receive one micro-batch at a time.
    """

    strategy: str
    num_shards: int = 1
    shard: int = 0
    num_micro_batches: int = 1
    wire_dtype: torch.dtype | None = None
    on_gloo: bool = True
    is_sequential: bool = False
    steps_in_backward: bool = False
    reads_in_backward: bool = False
    num_backwards: int = 1
    holds_all_batches: bool = True

    @property
    def is_sharded(self) -> bool:
        """True if parameters are sharded."""
        return self.strategy not in ("single", "ddp")

    @property
    def frees_parameters(self) -> bool:
        """True if units are resharded after their forward pass."""
        return self.strategy in ("zero3", "hsdp")

    @property
    def accumulates_unsharded(self) -> bool:
        """True if unsharded gradients are accumulated over the micro-batches before the reduction."""
        return self.strategy == "zero1" and self.num_micro_batches > 1


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Sizes of the tensors of one unit under one layout, in bytes.

    Attributes:
        stored: this rank's padded shard between steps.
        gathered: the padded unsharded unit, in the dtype of the computation.
        cast: this rank's shard in the dtype of the computation, if this dtype differs from the stored dtype.
        gradient: gradients of the unsharded weights, as computed in the backward pass.
        kept_gradient: gradients of scalars, which are not sharded; they exist from a backward pass until the update.
        summed: gradients of the unsharded weights in the dtype of the reduction.
        last_share: fraction of the gradients that belongs to the last weight. ``fully_shard`` retains the gradient of
            this weight until the reduction ends.
        sent: buffer from which gradients are sent.
        received: on gloo, buffers that receive the shards of the other ranks, in addition to the output.
        part: gradient of this rank's shard.
        output: output of the reduction, if the output and the gradient are separate tensors.
        is_direct: True if one of the received shards is stored in the output.
        comes_late: True if the reduction may stay pending until the next reduction starts.
    """

    stored: int
    gathered: int
    cast: int
    gradient: int
    kept_gradient: int
    summed: int
    last_share: float
    sent: int
    received: int
    part: int
    output: int
    is_direct: bool
    comes_late: bool


def unit_bytes(unit: Unit, layout: Layout) -> UnitBytes:
    """Return the sizes of the tensors of ``unit`` under ``layout``. Equal blocks share a cached result."""
    return _unit_bytes(unit.weights, unit.gathered_dtype, unit.sum_dtype, layout)


@cache
def _unit_bytes(
    weights: tuple[Weight, ...], gathered_dtype: torch.dtype, sum_dtype: torch.dtype, layout: Layout
) -> UnitBytes:
    whole = [each for each in weights if layout.is_sharded and not each.shape]
    weights = tuple(each for each in weights if each not in whole)
    padded = [padded_elements(each.shape, layout) for each in weights]
    trained = [(math.prod(each.shape), num) for each, num in zip(weights, padded, strict=True) if each.is_trained]
    num_trained, num_sent = sum(own for own, _ in trained), sum(num for _, num in trained)
    weight_dtype = weights[0].dtype if weights else gathered_dtype
    gathered = sum(padded) * gathered_dtype.itemsize
    is_cast = any(each.dtype != gathered_dtype for each in weights)
    wire_dtype = layout.wire_dtype
    if wire_dtype is None:
        # Only the reduction between gloo ranks can send gradients in 16 bits and sum them in 32 bits.
        is_low = weight_dtype != gathered_dtype and layout.on_gloo and not layout.accumulates_unsharded
        wire_dtype = gathered_dtype if is_low else sum_dtype
    sent = num_sent * wire_dtype.itemsize
    own = num_sent // layout.num_shards
    result_dtype = sum_dtype if layout.on_gloo else wire_dtype
    is_direct = layout.on_gloo and layout.num_shards > 1 and wire_dtype == result_dtype
    # A reduction must complete if its result is reduced over replicas, or used by an update in the backward pass.
    is_used = layout.steps_in_backward or layout.reads_in_backward
    may_come_late = layout.on_gloo and layout.strategy != "hsdp" and not is_used and not layout.is_sequential
    return UnitBytes(
        stored=sum(num // layout.num_shards * each.dtype.itemsize for each, num in zip(weights, padded, strict=True))
        + sum(each.dtype.itemsize for each in whole),
        gathered=gathered,
        cast=gathered // layout.num_shards if is_cast else 0,
        gradient=num_trained * gathered_dtype.itemsize,
        kept_gradient=sum(each.dtype.itemsize for each in whole if each.is_trained),
        summed=num_trained * sum_dtype.itemsize,
        last_share=trained[-1][0] / num_trained if num_trained else 0.0,
        sent=sent,
        received=sent - sent // layout.num_shards * (2 if is_direct else 1) if layout.on_gloo else 0,
        part=own * weight_dtype.itemsize,
        output=own * result_dtype.itemsize if result_dtype != weight_dtype else 0,
        is_direct=is_direct,
        comes_late=may_come_late and weight_dtype == sum_dtype,
    )


def own_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Return the shape of this rank's chunk of dimension 0, which may be smaller or empty on the last ranks.

    Scalars are not sharded.
    """
    if not layout.is_sharded or not shape:
        return shape
    rows = math.ceil(shape[0] / layout.num_shards)
    return (min(max(shape[0] - rows * layout.shard, 0), rows), *shape[1:])


def own_elements(weight: Weight, layout: Layout) -> int:
    """Return the number of elements of this rank's shard of ``weight``."""
    return math.prod(own_shape(weight.shape, layout))


def own_bytes(weight: Weight, layout: Layout) -> int:
    """Return the size in bytes of this rank's shard of ``weight``."""
    return own_elements(weight, layout) * weight.dtype.itemsize


def padded_elements(shape: tuple[int, ...], layout: Layout) -> int:
    """Return the number of elements of a tensor after padding dimension 0 to full chunks."""
    if not layout.is_sharded or not shape:
        return math.prod(shape)
    return math.ceil(shape[0] / layout.num_shards) * layout.num_shards * math.prod(shape[1:])


class Walk:
    """Simulates the units of a sharded step and records the memory at each moment.

    The caller determines when a unit is required, when its gradients are computed, and when its backward pass ends.

    Args:
        units: units in the order of the forward pass.
        layout: the settings of the Plan that determine the sizes.
        now: bytes by kind before the step, in the order of ``KINDS``. The walk changes this list.
        sizes: sizes of the tensors of each unit; None computes these sizes from ``units`` and ``layout``.

    Attributes:
        now: current bytes by kind.
        notes: bytes by kind at the moments since the last :meth:`take_notes`.
        sizes: sizes of the tensors of each unit.
    """

    def __init__(
        self, units: Sequence[Unit], layout: Layout, now: list[int], sizes: Sequence[UnitBytes] | None = None
    ) -> None:
        self.units = units
        self.layout = layout
        self.sizes = sizes or [unit_bytes(each, layout) for each in units]
        self.now = now
        self.notes: list[NumBytes] = []
        self._gathered: set[int] = set()
        self._sent_ahead: set[int] = set()
        self._kept_buffer = 0  # buffer of the last all-gather in a forward pass
        self._sent_bytes = 0  # buffers of the last reduction
        self._summed_bytes = 0

    def note(self) -> None:
        """Record the current bytes."""
        self.notes.append(tuple(self.now))

    def take_notes(self) -> list[NumBytes]:
        """Return and clear the recorded moments."""
        notes, self.notes = self.notes, []
        return notes

    def enter(self, unit: int, following: Sequence[int], phase: str) -> None:
        """Unshard ``unit``. The units in ``following`` are prefetched during the computation of ``unit``."""
        if unit not in self._gathered:
            size = self.sizes[unit]
            self._send(unit)
            self._sent_ahead.discard(unit)
            self.now[_GATHERED] += size.gathered
            self.note()
            if phase == "forward" and not self.layout.on_gloo:
                self._free_buffer()
                self._kept_buffer = size.gathered
            else:
                self.now[_SENT] -= size.gathered
            self._gathered.add(unit)
        for each in following if not self.layout.is_sequential else ():
            if each not in self._gathered:
                self._send(each)

    def gathered_ahead(self, unit: int) -> Sequence[int]:
        """Return the indices of the units that are prefetched during the forward pass of ``unit``."""
        return [unit + 1] if self.layout.on_gloo and unit + 1 < len(self.units) else []

    def end_forward(self, unit: int) -> None:
        """Simulate the end of the forward pass of ``unit``."""
        if self.layout.frees_parameters and not self.units[unit].is_root:
            self._free(unit)

    def end_forward_of_all(self) -> None:
        """Simulate the end of the forward pass of the model."""
        self._free_buffer()

    def compute_gradients(self, unit: int, *, is_first: bool) -> None:
        """Simulate the computation of the gradients of ``unit``. ``is_first`` is True for the first micro-batch of a
        step."""
        self.take_over_gradients(unit, is_first=is_first)
        self.note()

    def take_over_gradients(self, unit: int, *, is_first: bool) -> None:
        """Count the gradients of ``unit`` after they were computed."""
        # If unsharded gradients are accumulated in their original dtype, new gradients are added in place.
        if is_first or not self.adds_in_place(unit):
            self.now[_GRADIENT] += self.sizes[unit].gradient
        self.now[_GRADIENT] += self.sizes[unit].kept_gradient if is_first else 0

    def adds_in_place(self, unit: int) -> bool:
        """Return whether later micro-batches of a step add to the unsharded gradients in place."""
        each = self.units[unit]
        return self.layout.accumulates_unsharded and each.sum_dtype == each.gathered_dtype

    def end_backward(self, unit: int, *, is_first: bool, is_last: bool) -> None:
        """Simulate the end of the backward pass of ``unit``. The flags are True for the first and the last micro-batch
        of a step."""
        size, layout = self.sizes[unit], self.layout
        is_summed = self.units[unit].sum_dtype == self.units[unit].gathered_dtype
        if layout.accumulates_unsharded and not is_last:
            if not is_summed:
                self.now[_GRADIENT] += size.summed if is_first else 0
                self.note()
                self.now[_GRADIENT] -= size.gradient
            return
        whole_bytes = size.gradient
        if layout.accumulates_unsharded and not is_summed:
            self.now[_GRADIENT] -= size.gradient
            whole_bytes = size.summed
        self._free(unit)
        if size.gradient:  # at least one weight of the unit is trained
            self._reduce(unit, whole_bytes, is_new=is_first or layout.accumulates_unsharded)

    def end_backward_of_all(self) -> None:
        """Simulate the end of the backward pass of the model."""
        self._free_sent()
        if self.layout.steps_in_backward:
            self.now[_GRADIENT] -= sum(each.kept_gradient for each in self.sizes)
        self.now[_SENT] -= self._summed_bytes
        self._summed_bytes = 0

    def _send(self, unit: int) -> None:
        if unit in self._sent_ahead:
            return
        self._sent_ahead.add(unit)
        size = self.sizes[unit]
        self.now[_SENT] += size.gathered
        self.now[_TEMPORARY] += size.cast
        self.note()
        self.now[_TEMPORARY] -= size.cast

    def _free(self, unit: int) -> None:
        if unit in self._gathered:
            self.now[_GATHERED] -= self.sizes[unit].gathered
            self._gathered.remove(unit)

    def _reduce(self, unit: int, whole_bytes: int, *, is_new: bool) -> None:
        layout, size = self.layout, self.sizes[unit]
        # A reduction must complete before its result is added to the gradients of an earlier micro-batch.
        comes_late = size.comes_late and is_new
        self._free_sent()
        self.now[_SENT] += size.sent
        self.note()
        last_bytes = int(whole_bytes * size.last_share)
        self.now[_GRADIENT] += last_bytes - whole_bytes
        self.now[_SENT] += size.received
        is_summed_again = layout.strategy == "hsdp" and not is_new
        is_received = not size.output and (is_summed_again or size.is_direct)
        part_kind = _GRADIENT if is_new else _SENT if is_received else _TEMPORARY
        is_sent = layout.strategy == "hsdp" or not layout.on_gloo or size.is_direct
        output_kind = _SENT if is_sent else _TEMPORARY
        self.now[output_kind] += size.output
        self.now[part_kind] += 0 if size.output else size.part
        self.note()
        self.now[_GRADIENT] -= last_bytes
        if not comes_late:
            self.now[_SENT] -= size.received
        if size.output:
            self.now[part_kind] += size.part
            self.note()
        if layout.steps_in_backward:
            self.now[_GRADIENT] -= size.part
        # Tensors of the reduction over replicas exist until the backward pass ends.
        if layout.strategy == "hsdp" and size.output:
            self._summed_bytes += size.output
        else:
            self.now[output_kind] -= size.output
        if is_summed_again and not size.output:
            self._summed_bytes += size.part
        elif not is_new:
            self.now[part_kind] -= size.part
        is_freed = layout.on_gloo and not comes_late
        self.now[_SENT] -= size.sent if is_freed else 0
        self._sent_bytes = 0 if is_freed else size.sent + size.received if comes_late else size.sent

    def _free_sent(self) -> None:
        self.now[_SENT] -= self._sent_bytes
        self._sent_bytes = 0

    def _free_buffer(self) -> None:
        self.now[_SENT] -= self._kept_buffer
        self._kept_buffer = 0


def in_order_of_gathering(units: Sequence[Unit]) -> list[int]:
    """Return the indices of the units that a backward pass all-gathers, in execution order.

    This order is the reverse of the forward order, except that a block comes before its norms.
    """
    blocks: list[list[int]] = []
    for number, unit in enumerate(units):
        if unit.is_inner:
            blocks[-1].append(number)
        elif not unit.is_looked_up and not unit.is_root:
            blocks.append([number])
    return [number for block in reversed(blocks) for number in block]


def gradient_bytes(weights: Sequence[Weight]) -> int:
    """Return the total size in bytes of the gradients of trained weights, in the dtype of each weight."""
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in weights if each.is_trained)
