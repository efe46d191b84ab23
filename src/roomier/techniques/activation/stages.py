"""Convert a recorded step to the optimization problem of :mod:`roomier.techniques.activation.budget_choice`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.budget_choice import SavingOption, Stage
from roomier.techniques.activation.copies import CopyTimes
from roomier.techniques.activation.profile import KEEPS, Call, InterceptionTime, Moment, Recorder, total_ns

# Fraction of a copy's time that counts as lost even if the copy overlaps with computation, to avoid unnecessary copies.
_COPY_COST = 0.02


class Way(NamedTuple):
    """Setting of a block. Each option of a block represents one setting.

    Attributes:
        keep: activations that are saved for backward.
        offloads: True if these activations are offloaded to host memory.
    """

    keep: Keep
    offloads: bool = False


KEPT_WAYS = tuple(Way(keep) for keep in KEEPS)
MOVED = Way(Keep.ALL, offloads=True)
WAYS = (*KEPT_WAYS, MOVED)  # in the order of the options; the last option exists only if blocks offload activations


@dataclass(frozen=True)
class Profile:
    """Measurements of one rank.

    Attributes:
        order: indices of the blocks that were recomputed, in the order of their first forward pass.
        stages: a first stage for the moments at which no block is between its forward and backward passes, then one
            stage for each block in ``order``. The first stage has a single option. Each other stage has one option for
            each of ``KEPT_WAYS``, and one for ``MOVED`` if blocks offload activations.
    """

    order: tuple[int, ...]
    stages: tuple[Stage, ...]


def profile_of(recorder: Recorder, times: CopyTimes | None = None) -> Profile:
    """Return the measurements of ``recorder`` as an optimization problem.

    Args:
        recorder: recorder that has recorded a complete step.
        times: times of copies to the host and back; None if blocks do not offload activations.
    """
    base_bytes = recorder.live.base_bytes
    # A block that no backward pass needed saves no activations, so it has no options.
    needed = {call.block for call in recorder.calls if call.kept_bytes is not None}
    order = tuple(dict.fromkeys(call.block for call in recorder.calls if call.block in needed))
    places = {block: place for place, block in enumerate(order, start=1)}
    outside_bytes = [0] * (len(order) + 1)
    own_moments: dict[int, list[Moment]] = defaultdict(list)
    for moment in recorder.moments:
        last = max((places.get(call.block, 0) for call in moment.alive), default=0)
        own = 0 if moment.own is None else places.get(moment.own.block, 0)
        if own:
            own_moments[own].append(moment)
        # Outside of blocks, or while a later block is between its forward and backward passes.
        if not own or last > own:
            outside_bytes[last] = max(outside_bytes[last], base_bytes + moment.peak_bytes)
    stages = [Stage((SavingOption(0, outside_bytes[0], 0),), outside_bytes[0])]
    for block, place in places.items():
        calls = [call for call in recorder.calls if call.block == block]
        options = [_option(keep, calls, own_moments[place], recorder) for keep in KEEPS]
        if times is not None:
            options.append(_moved_option(options[-1], calls, own_moments[place], recorder, times))
        stages.append(Stage(tuple(options), outside_bytes[place]))
    return Profile(order, tuple(stages))


def _option(keep: Keep, calls: list[Call], own: list[Moment], recorder: Recorder) -> SavingOption:
    block = calls[0].block

    known_bytes = max(call.kept_bytes[keep] for call in calls if call.kept_bytes is not None)

    def kept_bytes(alive: Iterable[Call]) -> int:
        return sum(
            known_bytes if call.kept_bytes is None else call.kept_bytes[keep] for call in alive if call.block == block
        )

    return SavingOption(
        kept_bytes=max(
            kept_bytes([*moment.alive, *([moment.own] if moment.own else [])]) for moment in recorder.moments
        ),
        own_peak_bytes=recorder.live.base_bytes
        + max(_own_peak(moment, keep) + kept_bytes(moment.alive) for moment in own),
        lost_ns=sum(lost_ns(call, keep, recorder.interception) for call in calls),
    )


def _moved_option(
    kept: SavingOption, calls: list[Call], own: list[Moment], recorder: Recorder, times: CopyTimes
) -> SavingOption:
    """Return the option that saves all activations of a block in host memory. ``kept`` is the option that saves all
    activations on the device.

    The arguments of the block are counted as if they stayed on the device, because another block can also save them.
    The arguments are counted a second time when they are copied back to the device.
    """
    moved_bytes = max(call.moved_bytes for call in calls)
    given_bytes = max(call.moved_bytes - call.own_moved_bytes for call in calls)
    unmoved_bytes = max(call.unmoved_bytes for call in calls)
    block = calls[0].block

    def num_calls(alive: Iterable[Call]) -> int:
        return sum(call.block == block for call in alive)

    num_moved = max(num_calls([*each.alive, *([each.own] if each.own else [])]) for each in recorder.moments)
    num_others = max(num_calls(moment.alive) for moment in own)
    return SavingOption(
        kept_bytes=unmoved_bytes * num_moved,
        # The tensors of another call of the same block can be on the device in addition to the tensors of the current
        # call.
        own_peak_bytes=kept.own_peak_bytes + given_bytes + (moved_bytes if num_others else 0),
        lost_ns=sum(moved_ns(call, _call_after(call, recorder), times) for call in calls),
        moved_bytes=moved_bytes,
        num_moved=num_moved if moved_bytes else 0,
    )


def _call_after(call: Call, recorder: Recorder) -> Call:
    """Return the call that runs while the tensors of ``call`` are copied. For the last call of a forward pass, return
    ``call``."""
    for after in recorder.calls[recorder.calls.index(call) + 1 :]:
        if after.kept_bytes is not None:
            return after if after.backward_spans else call
    return call


def moved_ns(call: Call, after: Call, times: CopyTimes) -> int:
    """Return the time in nanoseconds that the copies of ``call`` add to a step.

    Copies to the host run during the forward pass of ``after``, and copies back run during the backward pass of
    ``after``.
    """
    out_ns, back_ns = (call.moved_bytes * each for each in (times.out_ns, times.back_ns))
    shown_ns = max(out_ns - total_ns(after.spans), 0) + max(back_ns - total_ns(after.backward_spans), 0)
    return round(shown_ns + _COPY_COST * (out_ns + back_ns))


def _own_peak(moment: Moment, keep: Keep) -> int:
    """Return the peak memory in an interval of a block if the block saves the activations that ``keep`` selects."""
    call = moment.own
    assert call is not None
    idle_bytes = call.idle_bytes if keep is Keep.PRODUCTS else 0
    if moment.phase == "forward" and keep is not Keep.INPUT:
        return max(moment.peak_bytes, call.start_level + call.rise_bytes + call.output_bytes + idle_bytes)
    if moment.phase == "again" and keep is Keep.ALL:
        return 0  # no second forward pass
    return moment.peak_bytes + idle_bytes


def lost_ns(call: Call, keep: Keep, interception: InterceptionTime) -> int:
    """Return the time in nanoseconds that a block's second forward pass takes if the block saves the activations that
    ``keep`` selects.

    In the measured step, each operation was intercepted once. To save products, each operation is intercepted
    twice, in the first and in the second forward pass.
    """
    seen_ns = interception.total_ns(call)
    match keep:
        case Keep.ALL:
            return 0
        case Keep.PRODUCTS:
            return max(total_ns(call.spans) - total_ns(call.product_spans) + seen_ns, 0)
        case Keep.INPUT:
            return max(total_ns(call.spans) - seen_ns, 0)


def worst_of(profiles: Sequence[Profile]) -> Profile:
    """Return a profile in which each number of bytes and each time is the maximum over ``profiles``. A choice based on
    the result is valid for all profiles.

    Args:
        profiles: profiles with the same order of blocks.
    """
    merged = []
    for stages in zip(*(profile.stages for profile in profiles), strict=True):
        options = tuple(
            SavingOption(*(max(values) for values in zip(*map(astuple, same), strict=True)))
            for same in zip(*(stage.options for stage in stages), strict=True)
        )
        merged.append(Stage(options, max(stage.outside_peak_bytes for stage in stages)))
    return Profile(profiles[0].order, tuple(merged))


def with_equal_times(stages: Sequence[Stage]) -> list[Stage]:
    """Return a copy of ``stages`` in which the times of blocks that save equal numbers of bytes are replaced by the
    median of these times.

    A single time measurement is inaccurate and must not cause different choices for equal blocks.
    """
    alike: dict[tuple[int, ...], list[Stage]] = defaultdict(list)
    for stage in stages:
        alike[_sizes(stage)].append(stage)
    times = {
        sizes: [int(statistics.median(stage.options[i].lost_ns for stage in same)) for i in range(len(sizes))]
        for sizes, same in alike.items()
    }
    return [
        replace(
            stage,
            options=tuple(
                replace(option, lost_ns=lost_ns)
                for option, lost_ns in zip(stage.options, times[_sizes(stage)], strict=True)
            ),
        )
        for stage in stages
    ]


def with_lost_ns(profile: Profile, lost_ns: Callable[[int, Keep], int]) -> Profile:
    """Return ``profile`` with other times for all options that save activations on the device.

    Args:
        profile: measurements of one rank.
        lost_ns: function that receives the index of a block and the activations that the block saves, and returns the
            lost time per step in nanoseconds.
    """
    first, *stages = profile.stages
    timed = [
        replace(
            stage,
            options=tuple(
                option if way.offloads else replace(option, lost_ns=lost_ns(block, way.keep))
                for option, way in zip(stage.options, WAYS, strict=False)
            ),
        )
        for block, stage in zip(profile.order, stages, strict=True)
    ]
    return replace(profile, stages=(first, *timed))


def _sizes(stage: Stage) -> tuple[int, ...]:
    return tuple(option.kept_bytes for option in stage.options)
