"""Simulation of a step, in which the host launches operations, the device executes them, and links transfer data.

[Note: overlap]
On a GPU, collectives run on separate streams, in the same order as in ``fully_shard``. A unit is all-gathered during
the computation of the previous unit. Its reduction starts after its backward pass, and the computation waits for the
previous reduction or, at the end of the model's backward pass, for all reductions. A collective is therefore exposed
only to the extent that it takes longer than the computation of the neighboring unit, but the first all-gather and the
last reduction are fully exposed. DDP reduces a bucket when its gradients are complete, and waits for all buckets at the
end of the last backward pass. The streams share one link, which transfers one collective at a time.

On a CPU, communication does not overlap with computation, because the threads that send and receive data, and the
copies to and from sockets, use the same cores. Collectives start early (``techniques/parallel/collectives.py``), but
this only hides the delays of other ranks, not the cost of sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from roomier.planner.timing.compute_time import Duration

_MOST_PLAYED = 3  # simulated micro-batches: the first, the last, and one for all others


@dataclass(frozen=True)
class Transfer:
    """A collective or a copy to the host in the simulation.

    Attributes:
        link_s: time for which the transfer occupies the link or a separate stream.
        device_s: time that the device needs for packing and unpacking.
        host_s: time that the host needs to launch the transfer.
        when: micro-batches in which the transfer runs: ``"each"``, only the ``"first"``, or only the ``"last"``.
        is_late: whether the transfer waits for the end of the backward pass.
    """

    link_s: float
    device_s: float = 0.0
    host_s: float = 0.0
    when: str = "each"
    is_late: bool = False


@dataclass(frozen=True)
class Segment:
    """Forward or backward pass of a part of the model for one micro-batch.

    Attributes:
        duration: duration of the computation.
        is_backward: whether the segment belongs to the backward pass.
        gathers: all-gathers before the computation.
        reduces: reductions after the computation.
        copy_s: time to copy saved activations to their tier in the forward pass, or to the device in the backward pass.
    """

    duration: Duration
    is_backward: bool
    gathers: tuple[Transfer, ...] = ()
    reduces: tuple[Transfer, ...] = ()
    copy_s: float = 0.0


@dataclass
class _Clocks:
    """Times at which the host, the device and the links become free."""

    host_s: float = 0.0
    device_s: float = 0.0
    link_s: float = 0.0
    copies_s: float = 0.0
    gathered_s: float | None = None  # end of the next all-gather; None if it has not started
    late: list[Transfer] = field(default_factory=list)


def play(
    segments: Sequence[Segment],
    num_micro_batches: int,
    *,
    is_cpu: bool,
    waits_each: bool,
    bucket_s: float = 0.0,
    is_sequential: bool = False,
) -> float:
    """Return the duration of the forward and backward passes of all micro-batches, in seconds.

    Args:
        segments: segments of one micro-batch, in execution order.
        num_micro_batches: number of micro-batches in a step.
        is_cpu: True to simulate ranks on a CPU, without overlap.
        waits_each: True to wait for the reductions at the end of each backward pass, as in ``fully_shard``.
        bucket_s: time for which one DDP bucket occupies the link; 0 sends each reduction separately.
        is_sequential: True to start an all-gather in the backward pass only when its unit is needed.
    """
    num_played = min(num_micro_batches, _MOST_PLAYED)
    clocks, ends = _Clocks(), [0.0]
    for index in range(num_played):
        is_first, is_last = index == 0, index == num_played - 1
        if is_cpu:
            clocks.device_s += _alone_s(segments, is_first=is_first, is_last=is_last)
        else:
            _play_micro_batch(
                clocks, segments, is_first=is_first, is_last=is_last, bucket_s=bucket_s, is_sequential=is_sequential
            )
            if waits_each or is_last:
                clocks.device_s = max(clocks.device_s, clocks.link_s)
        ends.append(clocks.device_s)
    num_left = num_micro_batches - num_played
    return ends[-1] + (num_left * (ends[2] - ends[1]) if num_left else 0.0)


def _alone_s(segments: Sequence[Segment], *, is_first: bool, is_last: bool) -> float:
    seconds = 0.0
    for each in segments:
        seconds += each.duration.device_s + each.duration.host_s + each.copy_s
        for transfer in (*each.gathers, *each.reduces):
            if _takes_place(transfer, is_first=is_first, is_last=is_last):
                seconds += transfer.link_s + transfer.device_s + transfer.host_s
    return seconds


def _takes_place(transfer: Transfer, *, is_first: bool, is_last: bool) -> bool:
    return transfer.when == "each" or (is_first if transfer.when == "first" else is_last)


def _play_micro_batch(
    clocks: _Clocks,
    segments: Sequence[Segment],
    *,
    is_first: bool,
    is_last: bool,
    bucket_s: float,
    is_sequential: bool,
) -> None:
    pending_s, was_backward = 0.0, False
    gathers = [
        [each for each in segment.gathers if _takes_place(each, is_first=is_first, is_last=is_last)]
        for segment in segments
    ]
    following_gather = _next_in_phase(segments, gathers)
    for index, (segment, following) in enumerate(zip(segments, (*segments[1:], None), strict=True)):
        if segment.is_backward and not was_backward:
            was_backward = True
            _begin_copy(clocks, segment.copy_s)
        if gathers[index]:
            ahead_s = 0.0 if is_sequential and segment.is_backward else following_gather[index]
            _gather(clocks, gathers[index], ahead_s)
        if segment.copy_s:  # of an earlier block (forward pass) or of this block (backward pass)
            clocks.device_s = max(clocks.device_s, clocks.copies_s)
        begin_s = clocks.device_s
        if not segment.is_backward:
            _begin_copy(clocks, segment.copy_s)
        elif following is not None:
            _begin_copy(clocks, following.copy_s)
        clocks.host_s += segment.duration.host_s
        clocks.device_s = max(clocks.device_s + segment.duration.device_s, clocks.host_s)
        for each in segment.reduces:
            if not _takes_place(each, is_first=is_first, is_last=is_last):
                continue
            if bucket_s:
                pending_s = _reduce_in_buckets(clocks, each, pending_s, bucket_s, begin_s)
            elif each.is_late:
                clocks.late.append(each)
            else:
                _reduce(clocks, each)
    for each in clocks.late:
        _reduce(clocks, each)
    clocks.late.clear()
    if pending_s:
        clocks.link_s = max(clocks.link_s, clocks.device_s) + pending_s


def _begin_copy(clocks: _Clocks, copy_s: float) -> None:
    if copy_s:
        clocks.copies_s = max(clocks.copies_s, clocks.device_s) + copy_s


def _next_in_phase(segments: Sequence[Segment], gathers: Sequence[list[Transfer]]) -> list[float]:
    """Return the link time of the next all-gather in the same phase for each segment; 0 if there is none."""
    found = [0.0] * len(segments)
    next_s = 0.0
    for index in reversed(range(len(segments))):
        if index + 1 < len(segments) and segments[index].is_backward != segments[index + 1].is_backward:
            next_s = 0.0
        found[index] = next_s
        own_s = sum(each.link_s for each in gathers[index])
        next_s = own_s or next_s
    return found


def _gather(clocks: _Clocks, gathers: Sequence[Transfer], following_s: float) -> None:
    """Wait for an all-gather, and start the next one, which takes ``following_s``."""
    clocks.host_s += sum(each.host_s for each in gathers)
    link_s = sum(each.link_s for each in gathers)
    if link_s and clocks.gathered_s is None:
        clocks.link_s = max(clocks.link_s, clocks.device_s) + link_s
        clocks.gathered_s = clocks.link_s
    clocks.device_s = max(clocks.device_s, clocks.host_s, (link_s and clocks.gathered_s) or 0.0)
    if link_s:
        clocks.gathered_s = None
        if following_s:
            clocks.link_s = max(clocks.link_s, clocks.device_s) + following_s
            clocks.gathered_s = clocks.link_s
    clocks.device_s += sum(each.device_s for each in gathers)


def _reduce(clocks: _Clocks, transfer: Transfer) -> None:
    clocks.host_s += transfer.host_s
    # The computation waits for the previous reduction, whose buffer is then freed.
    clocks.device_s = max(clocks.device_s, clocks.link_s) + transfer.device_s
    clocks.link_s = max(clocks.link_s, clocks.device_s, clocks.host_s) + transfer.link_s


def _reduce_in_buckets(clocks: _Clocks, transfer: Transfer, pending_s: float, bucket_s: float, begin_s: float) -> float:
    """Send the buckets that a segment fills, assuming that it produces gradients at a constant rate, and return the
    link time of the remaining gradients."""
    clocks.host_s += transfer.host_s
    clocks.device_s += transfer.device_s
    left_s = transfer.link_s
    while pending_s + left_s >= bucket_s:
        left_s -= bucket_s - pending_s
        share = 1 - left_s / transfer.link_s if transfer.link_s else 1.0
        ready_s = begin_s + share * (clocks.device_s - begin_s)
        clocks.link_s = max(clocks.link_s, ready_s) + bucket_s
        pending_s = 0.0
    return pending_s + left_s
