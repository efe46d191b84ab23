"""What each block keeps, so that a step stays within a budget at the least time lost.

[Note: the peak of a step as sums over the first blocks]
Blocks run forward in an order and backward in the reverse, so what is alive at a moment is what the first ``k`` blocks
keep, for some ``k``. A moment belongs to one block (its forward, its backward) or lies between two of them. What is
alive at it is

    (measured while every block kept the least) + (what the first k blocks keep beyond that least).

While a block's own backward runs, all that it saves is there whether it was kept or computed again, so at its own
moments only the blocks *before* it differ, and, at most, how high it reaches while it computes again.

[Note: why the choice is the best]
Blocks are taken in order; a state is (bytes kept beyond the least so far, time lost so far). Each limit that is still
to come bounds the bytes of the state from above and the time only adds up, so of two states the one with no fewer bytes
and no less time is never needed: what completes it completes the other at least as well. The states that are left give
the least time exactly. Equal blocks give equal sums, so of 100 blocks some hundred states are left; should many unequal
blocks leave more than ``MAX_STATES``, some are dropped evenly: the choice then still stays within the budget, and may
lose the least time by a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_STATES = 4096


@dataclass(frozen=True)
class Option:
    """One way for a block to keep what its backward needs.

    Attributes:
        kept_bytes: alive from its forward to its backward, beyond what it keeps at the least; may be below 0.
        own_peak_bytes: of everything on the device, while this block itself runs forward or backward and no block
            before it keeps more than the least.
        lost_ns: time that it costs in a step.
    """

    kept_bytes: int
    own_peak_bytes: int
    lost_ns: int


@dataclass(frozen=True)
class Stage:
    """A block, in the order of the forward.

    Attributes:
        options: the first is the least: it keeps 0 bytes beyond the least.
        outside_peak_bytes: of everything on the device, outside of blocks while this block and those before it are
            between their forward and their backward, and keep the least.
    """

    options: tuple[Option, ...]
    outside_peak_bytes: int


def peak_bytes(stages: Sequence[Stage], choice: Sequence[int]) -> int:
    """The most bytes at any moment of blocks that keep what ``choice`` says, an index of ``options`` for each."""
    kept_bytes, peak = 0, 0
    for stage, index in zip(stages, choice, strict=True):
        option = stage.options[index]
        peak = max(peak, kept_bytes + option.own_peak_bytes)
        kept_bytes += option.kept_bytes
        peak = max(peak, kept_bytes + stage.outside_peak_bytes)
    return peak


def choose(stages: Sequence[Stage], budget_bytes: int) -> list[int] | None:
    """The choice that loses the least time with a peak within ``budget_bytes``; None where there is none.

    See [Note: why the choice is the best]. Of equally good ones it keeps the later blocks, whose memory is needed for
    the shortest time.
    """
    kept: npt.NDArray[np.int64] = np.zeros(1, np.int64)
    lost: npt.NDArray[np.int64] = np.zeros(1, np.int64)
    came_from: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for stage in stages:
        parts = []
        for index, option in enumerate(stage.options):
            states = np.flatnonzero(
                (kept + option.own_peak_bytes <= budget_bytes)
                & (kept + option.kept_bytes + stage.outside_peak_bytes <= budget_bytes)
            )
            chosen = np.full_like(states, index)
            parts.append(
                (kept[states] + option.kept_bytes, lost[states] + option.lost_ns, kept[states], states, chosen)
            )
        kept, lost, before, states, chosen = (np.concatenate(each) for each in zip(*parts, strict=True))
        left = _useful(kept, lost, before)
        if not len(left):
            return None
        kept, lost = kept[left], lost[left]
        came_from.append((states[left], chosen[left]))
    state = int(np.argmin(lost)) if len(lost) else 0
    choice = []
    for states, chosen in reversed(came_from):
        choice.append(int(chosen[state]))
        state = int(states[state])
    return choice[::-1]


def least_peak_bytes(stages: Sequence[Stage]) -> int:
    """The lowest budget for which there is a choice."""
    low, high = 0, peak_bytes(stages, [0] * len(stages))
    while low < high:
        middle = (low + high) // 2
        if choose(stages, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


def _useful(
    kept: npt.NDArray[np.int64], lost: npt.NDArray[np.int64], before: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Indices of the states that are needed, by bytes kept; of equal ones the one with fewer bytes ``before``."""
    order = np.lexsort((before, lost, kept))
    sorted_lost = lost[order]
    least_before = np.minimum.accumulate(sorted_lost)[:-1]
    is_needed = np.ones(len(order), bool)
    is_needed[1:] = sorted_lost[1:] < least_before
    needed: npt.NDArray[np.int64] = order[is_needed]
    if len(needed) > MAX_STATES:
        needed = needed[np.linspace(0, len(needed) - 1, MAX_STATES).astype(np.int64)]
    return needed
