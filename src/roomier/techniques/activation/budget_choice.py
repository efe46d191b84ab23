"""Choice of the activations that each block saves. A step must stay within a memory budget and lose as little time as
possible.

[Note: the peak of a step as sums over the first blocks]
Blocks run forward in one order and backward in the reverse order. At each moment, which is within a pass of one block
or between two blocks, a number ``k`` therefore exists such that the first ``k`` blocks have saved activations and no
other block has. The memory in use at this moment is:

    (measured while every block saved the minimum) + (saved by the first k blocks in addition to the minimum).

While the backward pass of a block runs, all its activations exist, whether they were saved or recomputed. The memory in
use therefore depends only on the choices for the blocks *before* it, and on the peak of its own recomputation.

[Note: why the choice is optimal]
Blocks are processed in order. A state is the pair (additional bytes saved so far, time lost so far). At each later
block, the budget limits the bytes of a state, and the lost time only increases. A state can therefore be dropped if
another state has at most as many bytes and at most as much lost time: every sequence of later choices that is possible
after the dropped state is also possible after the other one, and costs no more time. The remaining states contain the
exact optimum. Equal blocks have equal sums, so about a hundred states remain for 100 blocks. Many unequal blocks can
result in more than ``MAX_STATES`` states, of which only ``MAX_STATES`` evenly spaced ones are retained. The choice is
then still within the budget, but can be slightly slower than the optimum.

[Note: what waits in host memory]
The offloaded tensors of at most two calls are on the device at a time (:mod:`roomier.techniques.activation.copies`).
They belong to blocks between their forward and backward passes, so the total size of the two largest calls of the first
``k`` blocks is an upper bound on the offloaded bytes on the device. If the block that runs at this moment is offloaded,
only one other offloaded call is on the device.

To compare options, each offloaded call is counted with the size of the largest allowed call. A state then contains only
the number of offloaded calls (zero, one, or at least two, because a third call adds no memory), and only states with
the same number are compared. Several values are tried for the largest size. If offloaded blocks have equal sizes, the
choice is optimal. Otherwise, the bound can be too large, but never too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_STATES = 4096
MAX_MOVED_SIZES = 4  # number of candidate sizes of the largest offloaded call
_NUM_THERE = 2  # maximum number of offloaded calls on the device at a time

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SavingOption:
    """One option for saving the activations of a block.

    Attributes:
        kept_bytes: bytes in use from the forward pass of the block to its backward pass, in addition to the minimum;
            can be negative.
        own_peak_bytes: peak of all memory on the device while this block runs forward or backward, if all blocks before
            it save the minimum.
        lost_ns: time that the option costs per step, in nanoseconds.
        moved_bytes: bytes that one call offloads to host memory; 0 without offloading. ``kept_bytes`` does not contain
            the offloaded bytes that are temporarily on the device; see [Note: what waits in host memory].
        num_moved: maximum number of calls of the block that are between forward and backward at the same time.
    """

    kept_bytes: int
    own_peak_bytes: int
    lost_ns: int
    moved_bytes: int = 0
    num_moved: int = 0


@dataclass(frozen=True)
class Stage:
    """Block with its options. Stages are in the order of the forward pass.

    Attributes:
        options: options of the block. The first option is the minimum, with 0 additional bytes.
        outside_peak_bytes: peak of all memory on the device while no block runs, and only this block and the blocks
            before it are between forward and backward. These blocks save the minimum.
    """

    options: tuple[SavingOption, ...]
    outside_peak_bytes: int


def peak_bytes(stages: Sequence[Stage], choice: Sequence[int]) -> int:
    """Return the peak memory of a step in bytes. ``choice`` contains the index of an option for each stage."""
    kept_bytes, peak = 0, 0
    moved: list[int] = []  # in descending order
    for stage, index in zip(stages, choice, strict=True):
        option = stage.options[index]
        others = moved[: _NUM_THERE - 1] if option.moved_bytes else moved
        peak = max(peak, kept_bytes + sum(others) + option.own_peak_bytes)
        kept_bytes += option.kept_bytes
        moved = sorted([*moved, *[option.moved_bytes] * option.num_moved], reverse=True)[:_NUM_THERE]
        peak = max(peak, kept_bytes + sum(moved) + stage.outside_peak_bytes)
    return peak


def total_lost_ns(stages: Sequence[Stage], choice: Sequence[int]) -> int:
    """Return the time that ``choice`` costs per step, in nanoseconds."""
    return sum(stage.options[index].lost_ns for stage, index in zip(stages, choice, strict=True))


def choose(stages: Sequence[Stage], budget_bytes: int) -> list[int] | None:
    """Return the choice with the least lost time whose peak is within ``budget_bytes``; None if no choice fits.

    See [Note: why the choice is optimal]. Among equally good choices, this function prefers choices without offloading
    and choices that save activations in later blocks, because later blocks use the memory for a shorter time.
    """
    found = [_choose(stages, budget_bytes, largest_bytes) for largest_bytes in _largest_moved(stages)]
    return min(
        (choice for choice in found if choice is not None), key=lambda each: total_lost_ns(stages, each), default=None
    )


def _largest_moved(stages: Sequence[Stage]) -> list[int]:
    """Return the sizes to try for the largest offloaded call: 0, the largest size, and some sizes in between."""
    sizes = sorted({option.moved_bytes for stage in stages for option in stage.options} - {0})
    places = np.linspace(len(sizes) - 1, 0, min(len(sizes), MAX_MOVED_SIZES)).astype(np.int64)
    return [0, *(sizes[place] for place in places)]


def _choose(stages: Sequence[Stage], budget_bytes: int, largest_bytes: int) -> list[int] | None:
    """Return the best choice with offloaded calls of at most ``largest_bytes``, each counted with this size."""
    kept, lost, num_moved = (np.zeros(1, np.int64) for _ in range(3))  # ``kept`` includes offloaded calls on the device
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
    """Return the smallest budget in bytes for which a choice exists."""
    low, high = 0, peak_bytes(stages, [0] * len(stages))
    while low < high:
        middle = (low + high) // 2
        if choose(stages, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


def _useful(kept: Numbers, lost: Numbers, num_moved: Numbers, before: Numbers) -> Numbers:
    """Return the indices of the states to keep. Only states with equal ``num_moved`` are compared.

    Among equal states, the state that has fewer bytes in ``before`` is retained.
    """
    order = np.lexsort((before, lost, kept))
    parts = [order[num_moved[order] == number] for number in range(_NUM_THERE + 1)]
    return np.concatenate([_not_beaten(part, lost) for part in parts])


def _not_beaten(order: Numbers, lost: Numbers) -> Numbers:
    """Return the indices in ``order`` (ascending bytes) whose lost time is less than the lost time at every previous
    index."""
    sorted_lost = lost[order]
    is_needed = np.ones(len(order), bool)
    is_needed[1:] = sorted_lost[1:] < np.minimum.accumulate(sorted_lost)[:-1]
    needed: Numbers = order[is_needed]
    if len(needed) > MAX_STATES:
        needed = needed[np.linspace(0, len(needed) - 1, MAX_STATES).astype(np.int64)]
    return needed
