"""Orders in which a rank runs the micro-batches of its stages.

A schedule is a list of actions per rank. The engine runs the list, the planner simulates it, and both therefore agree
on the activations in flight and on the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Action:
    """One forward or backward pass of a stage.

    Attributes:
        is_forward: True for the forward pass, False for the backward pass.
        stage: number of the stage.
        index: number of the micro-batch in the window.
    """

    is_forward: bool
    stage: int
    index: int


def gpipe(rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> list[Action]:
    """Return all forward passes, then all backward passes (Huang et al. 2019, section 2.2).

    The last rank alternates both, so that the other ranks can start their backward passes earlier.
    """
    if rank == num_ranks - 1:
        return one_forward_one_backward(rank, num_ranks, stages_per_rank, num_micro_batches)
    stages = [rank + chunk * num_ranks for chunk in range(stages_per_rank)]
    forwards = [Action(True, stage, index) for stage in stages for index in range(num_micro_batches)]
    backwards = [Action(False, stage, index) for stage in reversed(stages) for index in range(num_micro_batches)]
    return forwards + backwards


def one_forward_one_backward(rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int) -> list[Action]:
    """Return an order in which a rank starts as few micro-batches as possible before it alternates forward and backward
    passes (Narayanan et al. 2021, section 2.2).

    With several stages per rank, the order is the interleaved one: micro-batches advance in groups of ``num_ranks``. If
    the last group is not complete, the order is that of a complete group, without the missing micro-batches.
    """
    num_padded = -(-num_micro_batches // num_ranks) * num_ranks
    forwards = _interleaved(rank, num_ranks, stages_per_rank, num_padded, is_forward=True)
    backwards = _interleaved(rank, num_ranks, stages_per_rank, num_padded, is_forward=False)
    if stages_per_rank == 1:
        num_started = num_ranks - 1 - rank
    else:
        num_started = 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * num_ranks
    num_started = min(num_started, len(forwards))
    steady = [each for pair in zip(forwards[num_started:], backwards, strict=False) for each in pair]
    actions = forwards[:num_started] + steady + backwards[len(forwards) - num_started :]
    return [each for each in actions if each.index < num_micro_batches]


def _interleaved(
    rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int, *, is_forward: bool
) -> list[Action]:
    chunks = range(stages_per_rank) if is_forward else range(stages_per_rank - 1, -1, -1)
    return [
        Action(is_forward, rank + chunk * num_ranks, index)
        for first in range(0, num_micro_batches, num_ranks)
        for chunk in chunks
        for index in range(first, first + num_ranks)
    ]


Schedule = Callable[[int, int, int, int], list[Action]]
"""Function of rank, number of ranks, stages per rank and number of micro-batches."""
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved_1f1b": one_forward_one_backward}
)
