"""Blocks that save as many activations as a memory budget allows, on the device or in a lower tier.

[Note: when the choice is made]
In the first step, each block saves the minimum, which is only its input, and the optimizers create their states. The
second step saves the same activations and is measured (:mod:`roomier.techniques.activation.profile`). The activations
to save are chosen before the third step (:mod:`roomier.techniques.activation.budget_choice`). With several ranks, the
choice is based on the worst value of each measurement over all ranks, so it is the same on all of them. Gradients are
bit-identical for every choice, so the step in which the choice is made does not affect the result.

A later step can have a batch with larger tensors than any measured batch. On one rank, the run measures this step as
well, and the new choice fits all measurements. With several ranks, the others do not have this measurement, so the
choice does not change, but a notice reports the batch.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.units import format_bytes
from roomier.plan.parts import ActivationPlan
from roomier.techniques.activation.block_forward import BlockForward, Keep, Recompute
from roomier.techniques.activation.budget_choice import (
    SavingOption,
    Stage,
    choose,
    least_peak_bytes,
    peak_bytes,
    total_lost_ns,
)
from roomier.techniques.activation.copies import CopyTimes
from roomier.techniques.activation.live_bytes import LiveBytes
from roomier.techniques.activation.profile import KEEPS, Call, InterceptionTime, Moment, Recorder, total_ns

_MEASURED_STEP = 2
_LAST_ATTEMPT = 5  # last step that can be measured; skipped steps are not measured

Sizes = tuple[int, ...]


class Estimates(Protocol):
    """Protocol of the values that replace measurements in a dry run, in which tensors have no memory and operations
    take no time."""

    def live_bytes(self) -> LiveBytes:
        """Return the object that measures the memory in use."""

    def lost_ns(self, block: int, keep: Keep) -> int:
        """Return the time per step, in nanoseconds, that recomputation of the block with index ``block`` takes if the
        block saves the activations that ``keep`` selects."""


class BudgetedRecompute(Recompute):
    """Blocks whose saved activations are chosen between two steps; see [Note: when the choice is made].

    Args:
        blocks: the :class:`BlockForward` of each block. If the blocks have an ``offload``, the choice can also save all
            activations of a block in host memory or on disk.
        activation: activation settings of the Plan, with ``budget_bytes`` or ``budget_fraction``.
        device: device whose memory is counted.
        ranks: ranks that make the same choice.

    Attributes:
        predicted_bytes: predicted peak memory of a step on the rank with the highest peak; None before the choice.
        lost_ns: predicted time per step for recomputation and for copies that do not overlap with computation, in
            nanoseconds; None before the choice.
        estimates: values that replace measurements in a dry run; None in a training run.
    """

    def __init__(
        self,
        blocks: Sequence[BlockForward],
        activation: ActivationPlan,
        *,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        super().__init__(blocks)
        self.predicted_bytes: int | None = None
        self.lost_ns: int | None = None
        self.estimates: Estimates | None = None
        self._activation = activation
        self._device = device
        self._ranks = ranks
        offload = blocks[0].offload
        self._copy_times = None if offload is None else offload.copies.times()
        self._place = "" if offload is None else offload.copies.place
        self._num_steps = 0
        self._profile: Profile | None = None
        self._recorder: Recorder | None = None
        self._is_recorded = False
        self._sizes: Sizes = ()  # the largest measured sizes
        self._has_warned = False
        self._keep_least()

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        self._num_steps += 1
        if self._is_recorded:
            self._decide()
        if self._num_steps < _MEASURED_STEP:
            return
        sizes = _sizes_of(batches)
        if self._profile is not None:
            if _larger_of(sizes, self._sizes) == _larger_of(self._sizes, ()):
                return
            if not self._ranks.is_alone:
                self._print_larger(sizes)
                return
        self._measure(optimizers, sizes)

    def end_step(self) -> None:
        if self._recorder is not None and not self._is_recorded:
            self._recorder.stop()
            self._is_recorded = True

    def abandon_step(self) -> None:
        if self._recorder is not None and not self._is_recorded:
            self._recorder.stop()
            self._recorder = None

    def _keep_least(self) -> None:
        for block in self.blocks:
            block.keep, block.offloads = Keep.INPUT, False

    def _measure(self, optimizers: Sequence[Optimizer], sizes: Sizes) -> None:
        self._keep_least()
        self._sizes = _larger_of(sizes, self._sizes)
        live = None if self.estimates is None else self.estimates.live_bytes()
        self._recorder = Recorder(self.blocks, self._device, live)
        self._recorder.start()
        for optimizer in optimizers:
            for tensor in torch_private.iter_tensors([optimizer.param_groups, list(optimizer.state.values())]):
                self._recorder.live.note(tensor)

    def _decide(self) -> None:
        assert self._recorder is not None
        self._recorder.note_update()
        own = profile_of(self._recorder, self._copy_times)
        profiles = self._ranks.gather(own if self.estimates is None else with_lost_ns(own, self.estimates.lost_ns))
        self._recorder, self._is_recorded = None, False
        if len({profile.order for profile in profiles}) > 1:
            problem = (
                "the ranks ran different blocks, or ran the blocks in different orders, so no common choice is possible"
            )
            action = "Use activation_checkpointing='full' or 'selective'"
            raise TrainingError("activation.policy", "budget", problem, action)
        if not profiles[0].order and self._num_steps <= _LAST_ATTEMPT:
            return  # the step was skipped, so the next step is measured
        earlier = [] if self._profile is None or self._profile.order != profiles[0].order else [self._profile]
        is_first = self._profile is None
        self._profile = worst_of([*profiles, *earlier])
        self._choose(with_equal_times(self._profile.stages), is_first)

    def _choose(self, stages: Sequence[Stage], is_first: bool) -> None:
        assert self._profile is not None
        budget_bytes = budget_bytes_of(self._activation, stages)
        choice = choose(stages, budget_bytes)
        if choice is None:
            least_bytes = least_peak_bytes(stages)
            if is_first:
                raise too_small(budget_bytes, least_bytes)
            notice(
                f"a larger batch does not fit into the activation budget of {format_bytes(budget_bytes)}, so each "
                "block now saves only its input"
            )
            choice = choose(stages, least_bytes)
            assert choice is not None
        for block, index in zip(self._profile.order, choice[1:], strict=True):
            self.blocks[block].keep, self.blocks[block].offloads = WAYS[index]
        self.predicted_bytes = peak_bytes(stages, choice)
        self.lost_ns = total_lost_ns(stages, choice)
        self._print_choice(budget_bytes, [WAYS[index] for index in choice[1:]])

    def _print_choice(self, budget_bytes: int, ways: Sequence[Way]) -> None:
        assert self.predicted_bytes is not None
        assert self.lost_ns is not None
        counts = Counter(ways)
        names = {
            Way(Keep.ALL): "all activations",
            MOVED: f"all activations {self._place}",
            Way(Keep.PRODUCTS): "the results of products",
            Way(Keep.INPUT): "only their input",
        }
        parts = [f"{counts[way]} save {name}" for way, name in names.items() if counts[way]]
        notice(
            f"activation budget of {format_bytes(budget_bytes)}: of {len(self.blocks)} blocks "
            f"{', '.join(parts) or 'none saves activations for backward'}; "
            f"predicted peak {format_bytes(self.predicted_bytes)}; "
            f"{'recomputation takes' if self._copy_times is None else 'recomputation and copies take'} "
            f"about {self.lost_ns / 1e6:.1f} ms of a step"
        )

    def _print_larger(self, sizes: Sizes) -> None:
        if not self._has_warned:
            self._has_warned = True
            notice(
                f"rank {self._ranks.world.rank} received a batch with tensors of {sizes} elements, but the activation "
                f"budget was measured with at most {self._sizes} elements. The budget may be exceeded",
                every_rank=True,
            )


def budget_bytes_of(activation: ActivationPlan, stages: Sequence[Stage]) -> int:
    """Return the budget that ``activation`` sets for the blocks of ``stages``, in bytes."""
    if activation.budget_bytes is not None:
        return activation.budget_bytes
    assert activation.budget_fraction is not None
    least_bytes = peak_bytes(stages, [0] * len(stages))
    most_bytes = peak_bytes(stages, [0] + [WAYS.index(Way(Keep.ALL))] * (len(stages) - 1))
    # Saving all activations can require less memory than saving only the inputs, because nothing is recomputed.
    return least_bytes + round(activation.budget_fraction * max(most_bytes - least_bytes, 0))


class BudgetTooSmallError(TrainingError):
    """Error for an activation budget that is too small for every choice of saved activations.

    Attributes:
        least_bytes: the smallest sufficient budget in bytes.
    """

    least_bytes = 0


def too_small(budget_bytes: int, least_bytes: int) -> BudgetTooSmallError:
    """Return the error for a budget that is too small for every choice of saved activations.

    Args:
        budget_bytes: the budget.
        least_bytes: the smallest sufficient budget.
    """
    problem = (
        f"is too small. The peak of a step is at least {least_bytes / 2**30:.3g} GiB ({format_bytes(least_bytes)}), "
        "even if only the inputs of blocks are saved"
    )
    action = (
        "Increase the budget. Or use smaller micro-batches with accumulate_grad_batches, chunked_loss=True if the "
        "logits are large, or, with several ranks, strategy='zero2'"
    )
    error = BudgetTooSmallError("activation.budget", f"{format_bytes(budget_bytes)}", problem, action)
    error.least_bytes = least_bytes
    return error


def _sizes_of(batches: Sequence[Any]) -> Sizes:
    """Return the number of elements of each tensor in a micro-batch. Each number is the maximum over ``batches``."""
    sizes: Sizes = ()
    for batch in batches:
        sizes = _larger_of(sizes, tuple(each.numel() for each in torch_private.iter_tensors(batch)))
    return sizes


def _larger_of(first: Sizes, second: Sizes) -> Sizes:
    return tuple(max(pair) for pair in zip_longest(first, second, fillvalue=0))


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


MOVED = Way(Keep.ALL, offloads=True)
# In the order of the options. The last option exists only if blocks offload activations.
WAYS = (*map(Way, KEEPS), MOVED)


@dataclass(frozen=True)
class Profile:
    """Measurements of one rank.

    Attributes:
        order: indices of the blocks that were recomputed, in the order of their first forward pass.
        stages: a first stage for the moments at which no block is between its forward and backward passes, then one
            stage for each block in ``order``. The first stage has a single option. Each other stage has one option for
            each of ``KEEPS``, and one for ``MOVED`` if blocks offload activations.
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
    return [_timed(stage, times[_sizes(stage)]) for stage in stages]


def with_lost_ns(profile: Profile, lost_ns: Callable[[int, Keep], int]) -> Profile:
    """Return ``profile`` with other times for all options that save activations on the device.

    Args:
        profile: measurements of one rank.
        lost_ns: function that receives the index of a block and the activations that the block saves, and returns the
            lost time per step in nanoseconds.
    """
    first, *stages = profile.stages
    timed = []
    for block, stage in zip(profile.order, stages, strict=True):
        ways = zip(stage.options, WAYS, strict=False)
        times = [option.lost_ns if way.offloads else lost_ns(block, way.keep) for option, way in ways]
        timed.append(_timed(stage, times))
    return replace(profile, stages=(first, *timed))


def _timed(stage: Stage, times: Sequence[int]) -> Stage:
    """Return ``stage`` with these times of its options."""
    options = [replace(option, lost_ns=each) for option, each in zip(stage.options, times, strict=True)]
    return replace(stage, options=tuple(options))


def _sizes(stage: Stage) -> tuple[int, ...]:
    return tuple(option.kept_bytes for option in stage.options)
