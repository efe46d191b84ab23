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

Gradients are freed after the update, so none exists between steps, except in the buckets of DDP. Hooks that read them
later keep them. A weight that is frozen is its parameter, and what is gathered of it, alone; one in few bits is a
buffer. They are not all there at once: a backward frees what is gathered, unit by unit, while gradients come. So the
peak is found by walking the units through a step. Dimension 0 is cut into chunks of equally many rows, as
``torch.chunk`` does; where it does not divide, gathered parameters and communication buffers are padded to whole
chunks, and the last ranks own less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from roomier.memory.kinds import MODEL_STATES, Kind, total_bytes
from roomier.memory.walk import KINDS, Layout, Walk, gradient_bytes, in_order_of_gathering, own_shape, unit_bytes
from roomier.memory.weights import Unit, Weight

StateBytes = Callable[[Weight, tuple[int, ...]], int]
"""What the optimizer keeps for a weight of which this rank updates a part of that shape."""


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
    kept = kept_bytes(units, layout, state_bytes, buffer_bytes)
    step = _CutStep(units, layout, kept) if layout.is_cut else _WholeStep(units, layout, kept)
    return ModelStates([*step.moments, Moment("between steps", {**step.now, Kind.GRADIENT: step.bucket_bytes})])


def kept_bytes(
    units: Sequence[Unit], layout: Layout, state_bytes: StateBytes, buffer_bytes: int = 0
) -> dict[Kind, int]:
    """What one rank has between steps, without gradients. See :func:`model_states` for the arguments."""
    trained = (weight for unit in units for weight in unit.weights if weight.is_trained)
    return {
        Kind.PARAMETER: buffer_bytes + sum(unit_bytes(each, layout).stored for each in units),
        Kind.OPTIMIZER_STATE: sum(state_bytes(each, own_shape(each.shape, layout)) for each in trained),
    }


def copied_bytes(units: Sequence[Unit], layout: Layout) -> int:
    """Of a copy of what is trained of this rank's part, in float32 at least: an average of the weights."""
    trained = (
        weight for unit in units for weight in unit.weights if weight.is_trained and weight.dtype.is_floating_point
    )
    return sum(
        math.prod(own_shape(each.shape, layout)) * torch.promote_types(each.dtype, torch.float32).itemsize
        for each in trained
    )


class _WholeStep:
    """One device, or DDP."""

    def __init__(self, units: list[Unit], layout: Layout, kept: dict[Kind, int]) -> None:
        self.moments: list[Moment] = []
        self.now = {**dict.fromkeys(Kind, 0), **kept}
        gradients = sum(gradient_bytes(unit.weights) for unit in units)
        is_ddp = layout.strategy == "ddp"
        self.bucket_bytes = gradients if is_ddp else 0  # DDP keeps its buckets between steps
        self.now[Kind.GRADIENT] += self.bucket_bytes
        self._note("forward")
        if layout.steps_in_backward:
            self._update_in_backward(units)
            return
        # Gradients that are not reduced yet stand beside the buckets.
        extra_bytes = gradients if not is_ddp or layout.num_micro_batches > 1 else 0
        self.now[Kind.GRADIENT] += extra_bytes
        self._note("backward")
        if is_ddp:
            self.now[Kind.GRADIENT] -= extra_bytes
        self._note("update")

    def _note(self, name: str) -> None:
        self.moments.append(Moment(name, dict(self.now)))

    def _update_in_backward(self, units: list[Unit]) -> None:
        # Those of a block wait for each other, its norms among them; the rest go one by one.
        groups: list[list[Weight]] = []
        for unit in units:
            if unit.is_inner:
                groups[-1] += unit.weights
            else:
                groups += [[weight] for weight in unit.weights] if unit.is_root else [list(unit.weights)]
        for group in reversed(groups):
            num_bytes = gradient_bytes(group)
            self.now[Kind.GRADIENT] += num_bytes
            self._note(f"backward, {group[0].name}")
            self.now[Kind.GRADIENT] -= num_bytes


class _CutStep:
    """Units of a model that is cut, in the order of its modules."""

    bucket_bytes = 0

    def __init__(self, units: list[Unit], layout: Layout, kept: dict[Kind, int]) -> None:
        self.moments: list[Moment] = []
        self._units = units
        self._walk = Walk(units, layout)
        for kind, num_bytes in kept.items():
            self._walk.add(kind, num_bytes)
        for index in range(layout.num_micro_batches):
            self._forward()
            is_first, is_last = index == 0, index == layout.num_micro_batches - 1
            self._backward(is_first=is_first, is_last=is_last)
            if layout.num_backwards > 1:  # fully_shard forgets the order of the forward with the first
                self._backward(is_first=is_first, is_last=is_last, gathers_ahead=False)
        self.moments.append(Moment("update", self.now))

    @property
    def now(self) -> dict[Kind, int]:
        return dict(zip(KINDS, self._walk.now, strict=True))

    def _take_notes(self) -> None:
        for note in self._walk.take_notes():
            event = "" if note.event == "computes" else f" {note.event}"
            name = f"{note.phase}, {self._units[note.unit].name}{event}"
            self.moments.append(Moment(name, dict(zip(KINDS, note.num_bytes, strict=True))))

    def _forward(self) -> None:
        for number in range(len(self._units)):
            self._walk.enter(number, self._walk.gathered_ahead(number), "forward")
            self._walk.end_forward(number)
        self._walk.end_forward_of_all()
        self._take_notes()

    def _backward(self, *, is_first: bool, is_last: bool, gathers_ahead: bool = True) -> None:
        walk = self._walk
        root = [number for number, unit in enumerate(self._units) if unit.is_root]
        others = [number for number, unit in enumerate(self._units) if not unit.is_root]
        late = [*root, *(number for number in others if self._units[number].ends_late)]
        waiting = in_order_of_gathering(self._units)
        following = dict(pairwise(waiting)) if gathers_ahead else {}
        for number in reversed(others):
            while number in waiting:
                next_one = waiting.pop(0)
                walk.enter(next_one, [following[next_one]] if next_one in following else [], "backward")
            walk.compute_gradients(number, is_first=is_first)
            if number not in late:
                walk.end_backward(number, is_first=is_first, is_last=is_last)
        for number in root:
            walk.compute_gradients(number, is_first=is_first)
        for number in late:
            walk.end_backward(number, is_first=is_first, is_last=is_last)
        walk.end_backward_of_all()
        self._take_notes()
