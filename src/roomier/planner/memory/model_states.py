"""Prediction of the sizes of model states during a step from the strategy and the shapes of the weights.

[Note: bytes per parameter and rank]
A parameter occupies ``w`` bytes (4 in float32). The unsharded copy of a parameter for the computation occupies ``c``
bytes (2 for the weights of matrix products under autocast, otherwise ``w``). AdamW has two states of ``w`` bytes. With
``N`` ranks, the bytes per parameter are:

    strategy     parameter   unsharded         gradient                              optimizer state
    single       w           0                 w                                     2w
    ddp          w           0                 w (buckets); 2w with accumulation     2w
    zero1        w/N         c, for the step   c, one unit; w with accumulation      2w/N
                                               w/N after the reduction
    zero2        w/N         c, for the step   c, one unit; w/N after each unit      2w/N
    zero3, hsdp  w/N         c, two units      c, one unit; w/N after each unit      2w/N

Gradients are freed after the update, so none exist between steps, except in the buckets of DDP or if a hook reads them
later. A frozen weight has only the parameter and its unsharded copy. A quantized weight is a buffer.

The peak is smaller than the sum of a row of the table, because a backward pass frees the unsharded parameters unit by
unit while gradients are allocated. It is therefore computed by simulating the units of a step. Tensors are sharded
along dimension 0 as in ``torch.chunk``. If its size is not divisible by ``N``, the last ranks have fewer rows, and
unsharded parameters and communication buffers are padded to full chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from roomier.planner.memory.kinds import MODEL_STATES, Kind, total_bytes
from roomier.planner.memory.walk import (
    KINDS,
    Layout,
    Walk,
    gradient_bytes,
    in_order_of_gathering,
    own_elements,
    own_shape,
    unit_bytes,
)
from roomier.planner.memory.weights import Unit, Weight

StateBytes = Callable[[Weight, tuple[int, ...]], int]
"""Function that returns the size of a weight's optimizer states in bytes, given the shape of the shard on this rank."""


@dataclass(frozen=True)
class StatesMoment:
    """Memory at one moment of a step.

    Attributes:
        num_bytes: bytes on this rank by kind.
    """

    num_bytes: dict[Kind, int]

    def total(self, kinds: Iterable[Kind] = MODEL_STATES) -> int:
        """Return the total number of bytes of ``kinds``."""
        return total_bytes(self.num_bytes, kinds)


@dataclass(frozen=True)
class ModelStates:
    """Predicted sizes of the model states during a step in which the optimizer states already exist.

    Attributes:
        moments: moments in order; the last moment is between two steps.
    """

    moments: list[StatesMoment]

    @property
    def peak(self) -> StatesMoment:
        """Moment at which the sum of all model states is largest."""
        return max(self.moments, key=StatesMoment.total)

    @property
    def between_steps(self) -> StatesMoment:
        """Moment between two steps."""
        return self.moments[-1]


def model_states(units: list[Unit], layout: Layout, state_bytes: StateBytes, buffer_bytes: int = 0) -> ModelStates:
    """Return the predicted sizes of the model states of one rank during a step.

    Args:
        units: result of :func:`roomier.planner.memory.weights.units_with_weights`, with the root first and the other
            units in the order of the forward pass.
        layout: the settings of the Plan that determine the sizes.
        state_bytes: function that returns the size of the optimizer states of a weight in bytes; see
            :mod:`roomier.techniques.optim.state_bytes`.
        buffer_bytes: result of :func:`roomier.planner.memory.weights.buffer_bytes`.
    """
    kept = kept_bytes(units, layout, state_bytes, buffer_bytes)
    return ModelStates((_sharded_moments if layout.is_sharded else _unsharded_moments)(units, layout, kept))


def kept_bytes(
    units: Sequence[Unit], layout: Layout, state_bytes: StateBytes, buffer_bytes: int = 0
) -> dict[Kind, int]:
    """Return the predicted bytes by kind on one rank between steps, without gradients. See :func:`model_states` for the
    arguments."""
    trained = (weight for unit in units for weight in unit.weights if weight.is_trained)
    return {
        Kind.PARAMETER: buffer_bytes + sum(unit_bytes(each, layout).stored for each in units),
        Kind.OPTIMIZER_STATE: sum(state_bytes(each, own_shape(each.shape, layout)) for each in trained),
    }


def copied_bytes(units: Sequence[Unit], layout: Layout) -> int:
    """Return the size in bytes of this rank's averaged copy of the trained weights, in float32 or a wider dtype."""
    trained = (
        weight for unit in units for weight in unit.weights if weight.is_trained and weight.dtype.is_floating_point
    )
    return sum(own_elements(each, layout) * torch.promote_types(each.dtype, torch.float32).itemsize for each in trained)


def _unsharded_moments(units: list[Unit], layout: Layout, kept: dict[Kind, int]) -> list[StatesMoment]:
    """Return the moments of a step with unsharded parameters, on a single device or with DDP."""

    def moment(gradient: int) -> StatesMoment:
        return StatesMoment({**dict.fromkeys(Kind, 0), **kept, Kind.GRADIENT: gradient})

    gradients = sum(gradient_bytes(unit.weights) for unit in units)
    is_ddp = layout.strategy == "ddp"
    buckets = gradients if is_ddp else 0  # DDP retains its buckets between steps
    if layout.steps_in_backward:
        # The parameters of a block, including its norms, are updated together, parameters outside the blocks one by
        # one.
        groups: list[list[Weight]] = []
        for unit in units:
            if unit.is_inner:
                groups[-1] += unit.weights
            else:
                groups += [[weight] for weight in unit.weights] if unit.is_root else [list(unit.weights)]
        later = [moment(buckets + gradient_bytes(each)) for each in groups]
    else:
        # Gradients that are not reduced yet exist in addition to the buckets.
        extra = gradients if not is_ddp or layout.num_micro_batches > 1 else 0
        later = [moment(buckets + extra)]
    return [*later, moment(buckets)]


def _sharded_moments(units: list[Unit], layout: Layout, kept: dict[Kind, int]) -> list[StatesMoment]:
    """Return the moments of a step with sharded parameters, which runs the units in the order of the modules."""
    walk = Walk(units, layout, [kept.get(kind, 0) for kind in KINDS])
    for index in range(layout.num_micro_batches):
        for number in range(len(units)):
            walk.enter(number, walk.gathered_ahead(number), "forward")
            walk.end_forward(number)
        walk.end_forward_of_all()
        is_first, is_last = index == 0, index == layout.num_micro_batches - 1
        _run_backward(walk, is_first=is_first, is_last=is_last)
        if layout.num_backwards > 1:  # fully_shard discards the forward order after the first backward pass
            _run_backward(walk, is_first=is_first, is_last=is_last, gathers_ahead=False)
    moments = [dict(zip(KINDS, each, strict=True)) for each in (*walk.notes, walk.now)]
    return [*map(StatesMoment, moments), StatesMoment({**moments[-1], Kind.GRADIENT: 0})]


def _run_backward(walk: Walk, *, is_first: bool, is_last: bool, gathers_ahead: bool = True) -> None:
    root = [number for number, unit in enumerate(walk.units) if unit.is_root]
    others = [number for number, unit in enumerate(walk.units) if not unit.is_root]
    late = [*root, *(number for number in others if walk.units[number].ends_late)]
    waiting = in_order_of_gathering(walk.units)
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
