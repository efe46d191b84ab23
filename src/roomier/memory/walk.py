"""Units of a model taken through a step, and the bytes of model states that are there: see
[Note: when ``fully_shard`` allocates].

[Note: when ``fully_shard`` allocates]
A unit is gathered into one buffer and copied from there into its parameters. On gloo the next unit's buffer is filled
while it computes, as ``parallel/shard.py`` asks for; elsewhere the buffer of a forward stays until the next unit is
copied from its own (torch 2.13, ``FSDPParamGroup.wait_for_unshard``). In a backward both fill the next buffer ahead.
After the backward of a unit its parameters are freed, its gradients are copied into one buffer and freed. On gloo the
parts of the other ranks come into buffers of their own, and all these live until the reduction of the next unit has
begun; elsewhere the one buffer does, until the next unit needs one. The sum of this rank's part is its gradient. The
root, and embeddings, whose inputs have no gradient, do this when the whole backward is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from roomier.memory.kinds import Kind
from roomier.memory.weights import Unit, Weight, WeightShape

KINDS = tuple(Kind)
NumBytes = tuple[int, ...]
"""Of each of ``KINDS``."""

_PARAMETER, _GATHERED, _GRADIENT, _STATE, _ACTIVATION, _SENT, _TEMPORARY = (
    KINDS.index(each)
    for each in (
        Kind.PARAMETER,
        Kind.GATHERED,
        Kind.GRADIENT,
        Kind.OPTIMIZER_STATE,
        Kind.ACTIVATION,
        Kind.COMMUNICATION,
        Kind.TEMPORARY,
    )
)


@dataclass(frozen=True)
class Layout:
    """What of a Plan decides the bytes of model states.

    Args:
        strategy: ``"single"``, ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``, ``"hsdp"``.
        num_shards: among how many ranks one copy is cut; 1 cuts nothing.
        shard: which part this rank has. The first is never smaller than another.
        num_micro_batches: of one optimizer step.
        wire_dtype: in which gradients are sent; None as they are.
        on_gloo: ranks send each other their parts.
        steps_in_backward: gradients are used and freed as they come.
        num_backwards: of each micro-batch; a first one may take the norm.
        holds_all_batches: of a step, on the device: where that is the host. Else they come one by one.
    """

    strategy: str
    num_shards: int = 1
    shard: int = 0
    num_micro_batches: int = 1
    wire_dtype: torch.dtype | None = None
    on_gloo: bool = True
    steps_in_backward: bool = False
    num_backwards: int = 1
    holds_all_batches: bool = True

    @property
    def is_cut(self) -> bool:
        return self.strategy not in ("single", "ddp")

    @property
    def frees_parameters(self) -> bool:
        return self.strategy in ("zero3", "hsdp")

    @property
    def accumulates_whole(self) -> bool:
        """Gradients of whole parameters are added up over the micro-batches before they are cut."""
        return self.strategy == "zero1" and self.num_micro_batches > 1


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Of one unit, under one layout.

    Attributes:
        stored: of this rank's part between steps, padded.
        gathered: of the whole of it, padded, in the dtype it computes in.
        cast: of this rank's part in that dtype, where it is another.
        gradient: of gathered weights, as they come from a backward.
        kept_gradient: of weights that are not cut, from a backward to the update.
        summed: the same in the dtype in which they are added up.
        last_share: the share of the last weight in them: ``fully_shard`` holds its gradient until they are reduced.
        sent: the buffer from which they are sent.
        received: on gloo, what the parts of others come into.
        part: the gradient of this rank's part.
        output: what the sum comes into, where that is another tensor than the gradient.
        comes_late: the reduction may be waited for when the next begins.
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
    comes_late: bool


def unit_bytes(unit: Unit, layout: Layout) -> UnitBytes:
    """Of ``unit`` under ``layout``; equal blocks are computed once."""
    return _unit_bytes(unit.shapes, unit.gathered_dtype, unit.sum_dtype, layout)


@cache
def _unit_bytes(
    shapes: tuple[WeightShape, ...], gathered_dtype: torch.dtype, sum_dtype: torch.dtype, layout: Layout
) -> UnitBytes:
    whole = [each for each in shapes if layout.is_cut and not each.shape]
    shapes = tuple(each for each in shapes if each not in whole)
    padded = [padded_elements(each.shape, layout) for each in shapes]
    trained = [(math.prod(each.shape), num) for each, num in zip(shapes, padded, strict=True) if each.is_trained]
    num_trained, num_sent = sum(own for own, _ in trained), sum(num for _, num in trained)
    weight_dtype = shapes[0].dtype if shapes else gathered_dtype
    gathered = sum(padded) * gathered_dtype.itemsize
    is_cast = any(each.dtype != gathered_dtype for each in shapes)
    wire_dtype = layout.wire_dtype
    if wire_dtype is None:
        # Only between ranks that add up for themselves can gradients go out in 16 bits and be added up in 32.
        is_low = weight_dtype != gathered_dtype and layout.on_gloo and not layout.accumulates_whole
        wire_dtype = gathered_dtype if is_low else sum_dtype
    sent = num_sent * wire_dtype.itemsize
    own = num_sent // layout.num_shards
    result_dtype = sum_dtype if layout.on_gloo else wire_dtype
    # What is added to those of other copies is waited for, and so is what an update in the backward waits for.
    may_come_late = layout.on_gloo and layout.strategy != "hsdp" and not layout.steps_in_backward
    return UnitBytes(
        stored=sum(num // layout.num_shards * each.dtype.itemsize for each, num in zip(shapes, padded, strict=True))
        + sum(each.dtype.itemsize for each in whole),
        gathered=gathered,
        cast=gathered // layout.num_shards if is_cast else 0,
        gradient=num_trained * gathered_dtype.itemsize,
        kept_gradient=sum(each.dtype.itemsize for each in whole if each.is_trained),
        summed=num_trained * sum_dtype.itemsize,
        last_share=trained[-1][0] / num_trained if num_trained else 0.0,
        sent=sent,
        received=sent - sent // layout.num_shards if layout.on_gloo else 0,
        part=own * weight_dtype.itemsize,
        output=own * result_dtype.itemsize if result_dtype != weight_dtype else 0,
        comes_late=may_come_late and weight_dtype == sum_dtype,
    )


def own_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The part of a tensor that this rank owns: its chunk of dimension 0, smaller or empty at the end; all of one
    without a dimension."""
    if not layout.is_cut or not shape:
        return shape
    rows = math.ceil(shape[0] / layout.num_shards)
    return (min(max(shape[0] - rows * layout.shard, 0), rows), *shape[1:])


def padded_elements(shape: tuple[int, ...], layout: Layout) -> int:
    if not layout.is_cut or not shape:
        return math.prod(shape)
    return math.ceil(shape[0] / layout.num_shards) * layout.num_shards * math.prod(shape[1:])


class Note(NamedTuple):
    """What is there at one moment.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        unit: its place in the list of units.
        event: ``"sent"`` (its buffer is being filled), ``"gathered"``, ``"computes"``, ``"packed"``, ``"reduced"``,
            ``"cast"`` (into another dtype than that of the sum).
        num_bytes: by kind.
    """

    phase: str
    unit: int
    event: str
    num_bytes: NumBytes


class Walk:
    """Takes units through a step that is cut among ranks, and notes what is there.

    Who calls it says when a unit is needed, when its gradients come, and when its backward is over.

    Attributes:
        now: bytes by kind, at this moment.
        notes: of all moments since they were last taken.
        sizes: of each unit.
    """

    def __init__(self, units: Sequence[Unit], layout: Layout, sizes: Sequence[UnitBytes] | None = None) -> None:
        self.units = units
        self.layout = layout
        self.sizes = sizes or [unit_bytes(each, layout) for each in units]
        self.now = [0] * len(KINDS)
        self.notes: list[Note] = []
        self._gathered: set[int] = set()
        self._sent_ahead: set[int] = set()
        self._kept_buffer = 0  # of the last gather in a forward
        self._sent_bytes = 0  # of the last reduction
        self._summed_bytes = 0

    def add(self, kind: Kind, num_bytes: int) -> None:
        self.now[KINDS.index(kind)] += num_bytes

    def note(self, phase: str, unit: int, event: str) -> None:
        self.notes.append(Note(phase, unit, event, tuple(self.now)))

    def take_notes(self) -> list[Note]:
        notes, self.notes = self.notes, []
        return notes

    def enter(self, unit: int, following: Sequence[int], phase: str) -> None:
        """``unit`` is needed from here on; ``following`` are gathered beside what it computes."""
        if unit not in self._gathered:
            is_forward = phase == "forward"
            size = self.sizes[unit]
            self._send(unit, phase)
            self._sent_ahead.discard(unit)
            self.now[_GATHERED] += size.gathered
            self.note(phase, unit, "gathered")
            if is_forward and not self.layout.on_gloo:
                self._let_go_of_buffer()
                self._kept_buffer = size.gathered
            else:
                self.now[_SENT] -= size.gathered
            self._gathered.add(unit)
        for each in following:
            if each not in self._gathered:
                self._send(each, phase)

    def gathered_ahead(self, unit: int) -> Sequence[int]:
        """What is gathered in a forward beside what ``unit`` computes: the next."""
        return [unit + 1] if self.layout.on_gloo and unit + 1 < len(self.units) else []

    def end_forward(self, unit: int) -> None:
        """Its forward is over."""
        if self.layout.frees_parameters and not self.units[unit].is_root:
            self._free(unit)

    def end_forward_of_all(self) -> None:
        """The forward of the whole model is over."""
        self._let_go_of_buffer()

    def compute_gradients(self, unit: int, *, is_first: bool) -> None:
        """Its gradients come, in the first micro-batch of a step or a later one."""
        self.take_over_gradients(unit, is_first=is_first)
        self.note("backward", unit, "computes")

    def take_over_gradients(self, unit: int, *, is_first: bool) -> None:
        """Count its gradients, which have come already."""
        # Where those of whole parameters are added up in the dtype they have, the new ones go into the old.
        if is_first or not self.adds_in_place(unit):
            self.now[_GRADIENT] += self.sizes[unit].gradient
        self.now[_GRADIENT] += self.sizes[unit].kept_gradient if is_first else 0

    def adds_in_place(self, unit: int) -> bool:
        """Whether later micro-batches of a step add its whole gradients to what is there as they come."""
        each = self.units[unit]
        return self.layout.accumulates_whole and each.sum_dtype == each.gathered_dtype

    def end_backward(self, unit: int, *, is_first: bool, is_last: bool) -> None:
        """Its backward is over, of the first or the last micro-batch of a step."""
        size, layout = self.sizes[unit], self.layout
        is_summed = self.units[unit].sum_dtype == self.units[unit].gathered_dtype
        if layout.accumulates_whole and not is_last:
            if not is_summed:
                self.now[_GRADIENT] += size.summed if is_first else 0
                self.note("backward", unit, "packed")
                self.now[_GRADIENT] -= size.gradient
            return
        whole_bytes = size.gradient
        if layout.accumulates_whole and not is_summed:
            self.now[_GRADIENT] -= size.gradient
            whole_bytes = size.summed
        self._free(unit)
        if size.gradient:  # not all of it is frozen
            self._reduce(unit, whole_bytes, is_new=is_first or layout.accumulates_whole)

    def end_backward_of_all(self) -> None:
        """The backward of the whole model is over."""
        self._let_go_of_sent()
        if self.layout.steps_in_backward:
            self.now[_GRADIENT] -= sum(each.kept_gradient for each in self.sizes)
        self.now[_SENT] -= self._summed_bytes
        self._summed_bytes = 0

    def _send(self, unit: int, phase: str) -> None:
        if unit in self._sent_ahead:
            return
        self._sent_ahead.add(unit)
        size = self.sizes[unit]
        self.now[_SENT] += size.gathered
        self.now[_TEMPORARY] += size.cast
        self.note(phase, unit, "sent")
        self.now[_TEMPORARY] -= size.cast

    def _free(self, unit: int) -> None:
        if unit in self._gathered:
            self.now[_GATHERED] -= self.sizes[unit].gathered
            self._gathered.remove(unit)

    def _reduce(self, unit: int, whole_bytes: int, *, is_new: bool) -> None:
        layout, size = self.layout, self.sizes[unit]
        # What is added to gradients of an earlier micro-batch is waited for.
        comes_late = size.comes_late and is_new
        if not comes_late:
            self._let_go_of_sent()
        self.now[_SENT] += size.sent
        self.note("backward", unit, "packed")
        last_bytes = int(whole_bytes * size.last_share)
        self.now[_GRADIENT] += last_bytes - whole_bytes
        self.now[_SENT] += size.received
        is_summed_again = layout.strategy == "hsdp" and not is_new
        part_kind = _GRADIENT if is_new else _SENT if is_summed_again and not size.output else _TEMPORARY
        output_kind = _TEMPORARY if layout.on_gloo and layout.strategy != "hsdp" else _SENT
        self.now[output_kind] += size.output
        self.now[part_kind] += 0 if size.output else size.part
        self.note("backward", unit, "reduced")
        self.now[_GRADIENT] -= last_bytes
        if not comes_late:
            self.now[_SENT] -= size.received
        if size.output:
            self.now[part_kind] += size.part
            self.note("backward", unit, "cast")
        if layout.steps_in_backward:
            self.now[_GRADIENT] -= size.part
        # What went over the copies is held until the backward is over.
        if layout.strategy == "hsdp" and size.output:
            self._summed_bytes += size.output
        else:
            self.now[output_kind] -= size.output
        if is_summed_again and not size.output:
            self._summed_bytes += size.part
        elif not is_new:
            self.now[part_kind] -= size.part
        self._let_go_of_sent()
        self._sent_bytes = size.sent + size.received if comes_late else size.sent

    def _let_go_of_sent(self) -> None:
        self.now[_SENT] -= self._sent_bytes
        self._sent_bytes = 0

    def _let_go_of_buffer(self) -> None:
        self.now[_SENT] -= self._kept_buffer
        self._kept_buffer = 0


def in_order_of_gathering(units: Sequence[Unit]) -> list[int]:
    """The places of ``units`` as a backward gathers them: the last first, but a block before its norms, which it ends
    before."""
    blocks: list[list[int]] = []
    for number, unit in enumerate(units):
        if unit.is_inner:
            blocks[-1].append(number)
        elif not unit.is_looked_up and not unit.is_root:
            blocks.append([number])
    return [number for block in reversed(blocks) for number in block]


def gradient_bytes(weights: Sequence[Weight]) -> int:
    """Of those that are trained, in the dtype of each."""
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in weights if each.is_trained)
