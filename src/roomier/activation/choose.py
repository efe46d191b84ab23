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

[Note: what waits in host memory]
Of the calls whose tensors are moved, two at a time are on the device (:mod:`roomier.activation.offload`). All that are
there at a moment were called in a block that is between its forward and its backward, so the two largest among the
first ``k`` blocks bound them; beside the moment's own block, if it is moved, there is room for one. To choose, each
moved call is taken to be as large as the largest that may be moved. So a state needs only how many there are, none, one
or more, and states are compared among those of equal number; a third call adds nothing. That is tried for some sizes as
the largest. With moved blocks of one size the choice is the best; with others it may count too much, never too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_STATES = 4096
MAX_MOVED_SIZES = 4  # of moved calls, tried as the largest
_NUM_THERE = 2  # moved calls on the device at a time

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Option:
    """One way for a block to keep what its backward needs.

    Attributes:
        kept_bytes: alive from its forward to its backward, beyond what it keeps at the least; may be below 0.
        own_peak_bytes: of everything on the device, while this block itself runs forward or backward and no block
            before it keeps more than the least.
        lost_ns: time that it costs in a step.
        moved_bytes: of one call, wait in host memory; what of it is on the device is not in ``kept_bytes``, see [Note:
            what waits in host memory]. 0 where nothing is moved.
        num_moved: how many of its calls are between forward and backward at once.
    """

    kept_bytes: int
    own_peak_bytes: int
    lost_ns: int
    moved_bytes: int = 0
    num_moved: int = 0


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
    moved: list[int] = []  # the largest first
    for stage, index in zip(stages, choice, strict=True):
        option = stage.options[index]
        beside = moved[: _NUM_THERE - 1] if option.moved_bytes else moved
        peak = max(peak, kept_bytes + sum(beside) + option.own_peak_bytes)
        kept_bytes += option.kept_bytes
        moved = sorted([*moved, *[option.moved_bytes] * option.num_moved], reverse=True)[:_NUM_THERE]
        peak = max(peak, kept_bytes + sum(moved) + stage.outside_peak_bytes)
    return peak


def lost_ns(stages: Sequence[Stage], choice: Sequence[int]) -> int:
    """The time that ``choice`` costs in a step."""
    return sum(stage.options[index].lost_ns for stage, index in zip(stages, choice, strict=True))


def choose(stages: Sequence[Stage], budget_bytes: int) -> list[int] | None:
    """The choice that loses the least time with a peak within ``budget_bytes``; None where there is none.

    See [Note: why the choice is the best]. Of equally good ones it keeps the later blocks, whose memory is needed for
    the shortest time, and moves nothing.
    """
    found = [_choose(stages, budget_bytes, largest_bytes) for largest_bytes in _largest_moved(stages)]
    return min((choice for choice in found if choice is not None), key=lambda each: lost_ns(stages, each), default=None)


def _largest_moved(stages: Sequence[Stage]) -> list[int]:
    """What to try as the most that a call may move: 0, and some of the sizes there are, the largest of all included."""
    sizes = sorted({option.moved_bytes for stage in stages for option in stage.options} - {0})
    places = np.linspace(len(sizes) - 1, 0, min(len(sizes), MAX_MOVED_SIZES)).astype(np.int64)
    return [0, *(sizes[place] for place in places)]


def _choose(stages: Sequence[Stage], budget_bytes: int, largest_bytes: int) -> list[int] | None:
    """The same, where a call moves ``largest_bytes`` at the most, and counts as so much."""
    kept, lost, num_moved = (np.zeros(1, np.int64) for _ in range(3))  # kept: what is there of moved calls included
    came_from: list[tuple[Numbers, Numbers]] = []
    for stage in stages:
        parts = []
        for index, option in enumerate(stage.options):
            if option.moved_bytes > largest_bytes:
                continue
            num_then = np.minimum(num_moved + option.num_moved, _NUM_THERE)
            num_leaving = (num_moved == _NUM_THERE) & (option.moved_bytes > 0)
            kept_then = kept + option.kept_bytes + (num_then - num_moved) * largest_bytes
            states = np.flatnonzero(
                (kept - num_leaving * largest_bytes + option.own_peak_bytes <= budget_bytes)
                & (kept_then + stage.outside_peak_bytes <= budget_bytes)
            )
            chosen = np.full_like(states, index)
            parts.append(
                (kept_then[states], lost[states] + option.lost_ns, num_then[states], kept[states], states, chosen)
            )
        kept, lost, num_moved, before, states, chosen = (np.concatenate(each) for each in zip(*parts, strict=True))
        left = _useful(kept, lost, num_moved, before)
        if not len(left):
            return None
        kept, lost, num_moved = kept[left], lost[left], num_moved[left]
        came_from.append((states[left], chosen[left]))
    state = int(np.argmin(lost))
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


def _useful(kept: Numbers, lost: Numbers, num_moved: Numbers, before: Numbers) -> Numbers:
    """Indices of the states that are needed, of those of equal ``num_moved``; of equal states the one with fewer bytes
    ``before``."""
    order = np.lexsort((before, lost, kept))
    parts = [order[num_moved[order] == number] for number in range(_NUM_THERE + 1)]
    return np.concatenate([_not_beaten(part, lost) for part in parts])


def _not_beaten(order: Numbers, lost: Numbers) -> Numbers:
    """Of indices by rising bytes those that lose less than all before them."""
    sorted_lost = lost[order]
    is_needed = np.ones(len(order), bool)
    is_needed[1:] = sorted_lost[1:] < np.minimum.accumulate(sorted_lost)[:-1]
    needed: Numbers = order[is_needed]
    if len(needed) > MAX_STATES:
        needed = needed[np.linspace(0, len(needed) - 1, MAX_STATES).astype(np.int64)]
    return needed
