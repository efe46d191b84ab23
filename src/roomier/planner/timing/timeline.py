"""A step played through in time: the host starts work, the device does it, bytes travel beside it.

[Note: what is hidden]
On a GPU every exchange runs on a stream of its own. As ``fully_shard`` orders them: a unit is gathered while the unit
before it computes, not earlier; its reduction begins when its backward is over, and the computation waits for the one
before it; at the end of a backward all reductions are waited for. So of each exchange that part is exposed which its
neighbour's computation is too short for; the first gather and the last reduction are exposed whole. DDP reduces a
bucket when its gradients are complete, and waits for all at the end of the last backward. The streams share one link:
one exchange at a time.

Between ranks on a CPU nothing is beside the computation: the threads that send and receive, and the copies to and from
sockets, take the cores that compute. An exchange is begun early (``parallel/collectives.py``) and this hides that the
other rank is late, not the work of sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from roomier.planner.timing.compute_time import Duration

_MOST_PLAYED = 3  # micro-batches: the first, one as all others, and the last


@dataclass(frozen=True)
class Transfer:
    """An exchange, or a copy to the host, as the timeline sees it.

    Attributes:
        link_s: on the link, or on a stream of its own.
        device_s: of the device that computes, where it takes part: packing and unpacking.
        host_s: to start all that.
        in_first, in_others, in_last: in which micro-batches it takes place.
        is_late: waits for the end of the backward.
    """

    link_s: float
    device_s: float = 0.0
    host_s: float = 0.0
    in_first: bool = True
    in_others: bool = True
    in_last: bool = True
    is_late: bool = False


@dataclass(frozen=True)
class Segment:
    """A part of the model in the forward or the backward of one micro-batch.

    Attributes:
        gathers: before it computes.
        reduces: after it.
        copy_s: of what it keeps for its backward, to the host in the forward and back in the backward.
    """

    duration: Duration
    is_backward: bool
    gathers: tuple[Transfer, ...] = ()
    reduces: tuple[Transfer, ...] = ()
    copy_s: float = 0.0


@dataclass
class _Clocks:
    """When the host, the device and the links are free."""

    host_s: float = 0.0
    device_s: float = 0.0
    link_s: float = 0.0
    copies_s: float = 0.0
    gathered_s: float | None = None  # the next gather is over; None where it has not begun
    late: list[Transfer] = field(default_factory=list)


def play(
    segments: Sequence[Segment], num_micro_batches: int, *, is_cpu: bool, waits_each: bool, bucket_s: float = 0.0
) -> float:
    """Seconds of forward and backward of all micro-batches.

    Args:
        segments: of one micro-batch, in their order.
        waits_each: the end of each backward waits for its reductions (``fully_shard``).
        bucket_s: what travels together, in seconds on the link (DDP); 0 sends each reduction by itself.
    """
    num_played = min(num_micro_batches, _MOST_PLAYED)
    clocks, ends = _Clocks(), [0.0]
    for index in range(num_played):
        is_first, is_last = index == 0, index == num_played - 1
        if is_cpu:
            clocks.device_s += _alone_s(segments, is_first=is_first, is_last=is_last)
        else:
            _play_micro_batch(clocks, segments, is_first=is_first, is_last=is_last, bucket_s=bucket_s)
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
    if is_first or is_last:
        return (is_first and transfer.in_first) or (is_last and transfer.in_last)
    return transfer.in_others


def _play_micro_batch(
    clocks: _Clocks, segments: Sequence[Segment], *, is_first: bool, is_last: bool, bucket_s: float
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
            _gather(clocks, gathers[index], following_gather[index])
        if segment.copy_s:  # out: of the part before the one before; back: its own
            clocks.device_s = max(clocks.device_s, clocks.copies_s)
        begin_s = clocks.device_s
        if not segment.is_backward:
            _begin_copy(clocks, segment.copy_s)
        elif following is not None:
            _begin_copy(clocks, following.copy_s)
        _compute(clocks, segment.duration)
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


def _compute(clocks: _Clocks, duration: Duration) -> None:
    clocks.host_s += duration.host_s
    clocks.device_s = max(clocks.device_s + duration.device_s, clocks.host_s)


def _next_in_phase(segments: Sequence[Segment], gathers: Sequence[list[Transfer]]) -> list[float]:
    """How long the link takes for the segment after each that gathers something in the same phase; 0 for none."""
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
    """Wait for a gather, and begin the one after it, which takes ``following_s``."""
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
    # The buffer of the one before is freed when it is done, which the computation waits for.
    clocks.device_s = max(clocks.device_s, clocks.link_s) + transfer.device_s
    clocks.link_s = max(clocks.link_s, clocks.device_s, clocks.host_s) + transfer.link_s


def _reduce_in_buckets(clocks: _Clocks, transfer: Transfer, pending_s: float, bucket_s: float, begin_s: float) -> float:
    """Send the buckets that the gradients of a segment fill, evenly while it computes; returns what is left over."""
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
