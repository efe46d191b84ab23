"""The bytes of model states by formula: each strategy's memory, from shapes alone, over the moments of a step.

[Note: bytes per parameter and rank]
Of weights of ``w`` bytes (4), gathered for compute in ``c`` bytes (2 under autocast where they are multiplied, else
``w``), AdamW's two states of ``w`` bytes, cut among ``N`` ranks:

    strategy     parameter   gathered          gradient                              optimizer state
    single       w           0                 w                                     2w
    ddp          w           0                 w, its buckets; 2w if it accumulates  2w
    zero1        w/N         c, the step       c, one unit; w if it accumulates      2w/N
                                               w/N after the reduction
    zero2        w/N         c, the step       c, one unit; w/N behind it            2w/N
    zero3, hsdp  w/N         c, two units      c, one unit; w/N behind it            2w/N

A weight that is frozen is its parameter, and what is gathered of it, alone; one in few bits is a buffer. They are not
all there at once: a backward frees what is gathered, unit by unit, while gradients come. So the peak is
found by walking the units through a step. Dimension 0 is cut into chunks of equally many rows, as ``torch.chunk`` does;
where it does not divide, gathered parameters and communication buffers are padded to whole chunks, and the last ranks
own less.

[Note: when ``fully_shard`` allocates]
A unit is gathered into one buffer and copied from there into its parameters; while it computes, the next unit's buffer
is filled. After the backward of a unit its parameters are freed, its gradients are copied into one buffer and freed.
On gloo the parts of the other ranks come into buffers of their own, and all these live until the reduction of the next
unit has begun; elsewhere the one buffer does. The sum of this rank's part is its gradient. The root, and embeddings,
whose inputs have no gradient, do this when the whole backward is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from roomier.memory.kinds import MODEL_STATES, Kind, total_bytes
from roomier.memory.weights import Unit, Weight

StateBytes = Callable[[Weight, tuple[int, ...]], int]
"""What the optimizer keeps for a weight of which this rank updates a part of that shape."""


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
    """

    strategy: str
    num_shards: int = 1
    shard: int = 0
    num_micro_batches: int = 1
    wire_dtype: torch.dtype | None = None
    on_gloo: bool = True
    steps_in_backward: bool = False
    num_backwards: int = 1

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


@dataclass(frozen=True)
class Moment:
    """One moment of a step.

    Attributes:
        name: ``"forward, blocks.3"``.
        num_bytes: on this rank.
    """

    name: str
    num_bytes: dict[Kind, int]

    def total(self, kinds: Iterable[Kind] = MODEL_STATES) -> int:
        return total_bytes(self.num_bytes, kinds)


@dataclass(frozen=True)
class ModelStates:
    """A step from the second on, when the optimizer's states are there.

    Attributes:
        moments: in order; the last is that between two steps.
    """

    moments: list[Moment]

    @property
    def peak(self) -> Moment:
        """At which parameters, gathered ones, gradients and optimizer states together are largest."""
        return max(self.moments, key=Moment.total)

    @property
    def between_steps(self) -> Moment:
        return self.moments[-1]


def model_states(units: list[Unit], layout: Layout, state_bytes: StateBytes, buffer_bytes: int = 0) -> ModelStates:
    """The bytes of model states of one rank over a step.

    Args:
        units: from :func:`roomier.memory.weights.units_with_weights`, in the order of the forward, the root first.
        state_bytes: from :mod:`roomier.memory.optimizer_states`.
        buffer_bytes: from :func:`roomier.memory.weights.buffer_bytes`.
    """
    walk = _Walk(units, layout)
    walk.add(Kind.PARAMETER, buffer_bytes)
    for weight in (each for unit in units for each in unit.weights):
        own = own_shape(weight.shape, layout)
        # What fully_shard stores is padded to a whole chunk.
        walk.add(Kind.PARAMETER, _padded_elements(weight.shape, layout) // layout.num_shards * weight.dtype.itemsize)
        if weight.is_trained:
            walk.add(Kind.OPTIMIZER_STATE, state_bytes(weight, own))
    if layout.is_cut:
        walk.cut_step()
    else:
        walk.whole_step()
    walk.note("between steps")
    return ModelStates(walk.moments)


def own_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The part of a tensor that this rank owns: its chunk of dimension 0, smaller or empty at the end."""
    if not layout.is_cut:
        return shape
    rows = math.ceil(shape[0] / layout.num_shards)
    return (min(max(shape[0] - rows * layout.shard, 0), rows), *shape[1:])


def _padded_elements(shape: tuple[int, ...], layout: Layout) -> int:
    if not layout.is_cut:
        return math.prod(shape)
    return math.ceil(shape[0] / layout.num_shards) * layout.num_shards * math.prod(shape[1:])


class _Walk:
    """Takes the units through a step and notes what is there."""

    def __init__(self, units: list[Unit], layout: Layout) -> None:
        self.moments: list[Moment] = []
        self._units = units
        self._layout = layout
        self._now = dict.fromkeys(Kind, 0)
        self._gathered: set[Unit] = set()
        self._ahead: Unit | None = None  # whose buffer is being filled
        self._sent_bytes = 0  # of the last reduction
        self._summed_bytes = 0

    def add(self, kind: Kind, num_bytes: int) -> None:
        self._now[kind] += num_bytes

    def note(self, name: str) -> None:
        self.moments.append(Moment(name, dict(self._now)))

    def whole_step(self) -> None:
        gradient_bytes = sum(unit.gradient_bytes(lambda weight: math.prod(weight.shape)) for unit in self._units)
        is_ddp = self._layout.strategy == "ddp"
        if is_ddp:
            self.add(Kind.GRADIENT, gradient_bytes)  # DDP's buckets are there between steps too
        self.note("forward")
        if self._layout.steps_in_backward:
            self._update_in_backward()
            return
        # Gradients that are not reduced yet stand beside the buckets.
        extra_bytes = gradient_bytes if not is_ddp or self._layout.num_micro_batches > 1 else 0
        self.add(Kind.GRADIENT, extra_bytes)
        self.note("backward")
        if is_ddp:
            self.add(Kind.GRADIENT, -extra_bytes)
        self.note("update")

    def _update_in_backward(self) -> None:
        # Those of a block wait for each other, its norms among them; the rest go one by one.
        groups: list[list[Weight]] = []
        for unit in self._units:
            if unit.is_inner:
                groups[-1] += unit.weights
            else:
                groups += [[weight] for weight in unit.weights] if unit.is_root else [list(unit.weights)]
        for group in reversed(groups):
            num_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in group if each.is_trained)
            self.add(Kind.GRADIENT, num_bytes)
            self.note(f"backward, {group[0].name}")
            self.add(Kind.GRADIENT, -num_bytes)

    def cut_step(self) -> None:
        for index in range(self._layout.num_micro_batches):
            self._forward()
            is_last = index == self._layout.num_micro_batches - 1
            self._backward(is_first=index == 0, is_last=is_last)
            if self._layout.num_backwards > 1:  # fully_shard forgets the order of the forward with the first
                self._backward(is_first=index == 0, is_last=is_last, gathers_ahead=False)
        self.note("update")

    def _forward(self) -> None:
        for unit, following in zip(self._units, [*self._units[1:], None], strict=True):
            self._gather(unit, following, "forward")
            if self._layout.frees_parameters and not unit.is_root:
                self._free(unit)

    def _backward(self, *, is_first: bool, is_last: bool, gathers_ahead: bool = True) -> None:
        reduces = is_last or not self._layout.accumulates_whole
        root = [unit for unit in self._units if unit.is_root]  # none where all parameters belong to other units
        others = [unit for unit in self._units if not unit.is_root]
        late = [*root, *(unit for unit in others if unit.ends_late)]
        waiting = _in_order_of_gathering(others)
        for unit in reversed(others):
            while unit in waiting:
                self._gather(waiting.pop(0), waiting[0] if waiting and gathers_ahead else None, "backward")
            self._make_gradients(unit, is_first)
            if unit not in late:
                self._end_backward(unit, is_first=is_first, reduces=reduces)
        for unit in root:
            self._make_gradients(unit, is_first)
        for unit in late:
            self._end_backward(unit, is_first=is_first, reduces=reduces)
        self._let_go_of_sent()
        self.add(Kind.COMMUNICATION, -self._summed_bytes)
        self._summed_bytes = 0

    def _gather(self, unit: Unit, following: Unit | None, when: str) -> None:
        if unit not in self._gathered:
            self._begin_gather(unit, when)
            num_bytes = self._whole_elements(unit) * unit.gathered_dtype.itemsize
            self.add(Kind.GATHERED, num_bytes)
            self.note(f"{when}, {unit.name} gathered")
            self.add(Kind.COMMUNICATION, -num_bytes)
            self._gathered.add(unit)
            self._ahead = None
        if following is not None and following not in self._gathered:
            self._begin_gather(following, when)

    def _begin_gather(self, unit: Unit, when: str) -> None:
        if self._ahead is unit:
            return
        self._ahead = unit
        num_bytes = self._whole_elements(unit) * unit.gathered_dtype.itemsize
        is_cast = any(each.dtype != unit.gathered_dtype for each in unit.weights)
        cast_bytes = num_bytes // self._layout.num_shards if is_cast else 0
        self.add(Kind.COMMUNICATION, num_bytes)
        self.add(Kind.TEMPORARY, cast_bytes)
        self.note(f"{when}, {unit.name} sent")
        self.add(Kind.TEMPORARY, -cast_bytes)

    def _free(self, unit: Unit) -> None:
        if unit in self._gathered:
            self.add(Kind.GATHERED, -self._whole_elements(unit) * unit.gathered_dtype.itemsize)
            self._gathered.remove(unit)

    def _make_gradients(self, unit: Unit, is_first: bool) -> None:
        # Where those of whole parameters are added up in the dtype they have, the new ones go into the old.
        if is_first or not (self._layout.accumulates_whole and unit.sum_dtype == unit.gathered_dtype):
            self.add(Kind.GRADIENT, self._whole_gradient_bytes(unit, unit.gathered_dtype))
        self.note(f"backward, {unit.name}")

    def _end_backward(self, unit: Unit, *, is_first: bool, reduces: bool) -> None:
        layout = self._layout
        own_bytes = self._whole_gradient_bytes(unit, unit.gathered_dtype)
        sum_bytes = self._whole_gradient_bytes(unit, unit.sum_dtype)
        if not reduces:
            if is_first or unit.sum_dtype != unit.gathered_dtype:
                self.add(Kind.GRADIENT, -own_bytes)
            if is_first:
                self.add(Kind.GRADIENT, sum_bytes)
            return
        self._free(unit)
        if not own_bytes:  # all of it is frozen
            return
        whole_bytes = own_bytes
        if layout.accumulates_whole and unit.sum_dtype != unit.gathered_dtype:
            self.add(Kind.GRADIENT, -own_bytes)
            whole_bytes = sum_bytes
        self._reduce(unit, whole_bytes, is_new=is_first or layout.accumulates_whole)

    def _reduce(self, unit: Unit, whole_bytes: int, *, is_new: bool) -> None:
        layout = self._layout
        sent_bytes = self._reduced_elements(unit) * self._wire_dtype(unit).itemsize
        received_bytes = sent_bytes - sent_bytes // layout.num_shards if layout.on_gloo else 0
        part_bytes = self._reduced_elements(unit) // layout.num_shards * unit.weights[0].dtype.itemsize
        # What is added to gradients of an earlier micro-batch, or to those of other copies, is waited for.
        # So is what an update in the backward waits for.
        may_come_late = layout.on_gloo and layout.strategy != "hsdp" and not layout.steps_in_backward
        comes_late = may_come_late and is_new and unit.weights[0].dtype == unit.sum_dtype
        if not comes_late:
            self._let_go_of_sent()
        self.add(Kind.COMMUNICATION, sent_bytes)
        self.note(f"backward, {unit.name} packed")
        # fully_shard holds the last of them until it is done.
        *_, last = (math.prod(each.shape) for each in unit.weights if each.is_trained)
        last_bytes = whole_bytes * last // self._trained_elements(unit)
        self.add(Kind.GRADIENT, last_bytes - whole_bytes)
        self.add(Kind.COMMUNICATION, received_bytes)
        is_summed_again = layout.strategy == "hsdp" and not is_new
        part_kind = Kind.GRADIENT if is_new else Kind.COMMUNICATION if is_summed_again else Kind.TEMPORARY
        self.add(part_kind, part_bytes)
        self.note(f"backward, {unit.name} reduced")
        self.add(Kind.GRADIENT, -last_bytes)
        if layout.steps_in_backward:
            self.add(Kind.GRADIENT, -part_bytes)
        if is_summed_again:
            self._summed_bytes += part_bytes  # what went over the copies is held until the backward is over
        elif not is_new:
            self.add(part_kind, -part_bytes)
        self._let_go_of_sent()
        self._sent_bytes = sent_bytes + received_bytes if comes_late else sent_bytes
        if not comes_late:
            self.add(Kind.COMMUNICATION, -received_bytes)

    def _let_go_of_sent(self) -> None:
        self.add(Kind.COMMUNICATION, -self._sent_bytes)
        self._sent_bytes = 0

    def _wire_dtype(self, unit: Unit) -> torch.dtype:
        if self._layout.wire_dtype is not None:
            return self._layout.wire_dtype
        is_cast = unit.weights[0].dtype != unit.gathered_dtype
        # Only between ranks that add up for themselves can gradients go out in 16 bits and be added up in 32.
        is_low = is_cast and self._layout.on_gloo and not self._layout.accumulates_whole
        return unit.gathered_dtype if is_low else unit.sum_dtype

    def _whole_elements(self, unit: Unit) -> int:
        return sum(_padded_elements(each.shape, self._layout) for each in unit.weights)

    def _reduced_elements(self, unit: Unit) -> int:
        return sum(_padded_elements(each.shape, self._layout) for each in unit.weights if each.is_trained)

    def _whole_gradient_bytes(self, unit: Unit, dtype: torch.dtype) -> int:
        return self._trained_elements(unit) * dtype.itemsize

    def _trained_elements(self, unit: Unit) -> int:
        return sum(math.prod(each.shape) for each in unit.weights if each.is_trained)


def _in_order_of_gathering(units: list[Unit]) -> list[Unit]:
    """``units`` as a backward gathers them: the last first, but a block before its norms, which it ends before."""
    blocks: list[list[Unit]] = []
    for unit in units:
        if unit.is_inner:
            blocks[-1].append(unit)
        elif not unit.is_looked_up:
            blocks.append([unit])
    return [unit for block in reversed(blocks) for unit in block]
