"""Blocks that save as many activations as a memory budget allows, on the device or in a lower tier.

[Note: when the choice is made]
In the first step, each block saves the minimum, which is only its input, and the optimizers create their states. The
second step saves the same activations and is measured (:mod:`roomier.techniques.activation.profile`). The activations
to save are chosen before the third step (:mod:`roomier.techniques.activation.budget_choice`). With several ranks, the
choice uses the worst value of each measurement over all ranks, so all ranks make the same choice. Gradients are
bit-identical for every choice, so the step in which the choice is made does not affect the result.

A later step can have a batch with larger tensors than any measured batch. In this case, a run on one rank also measures
this step, and the new choice fits all measurements. With several ranks, the other ranks do not have this measurement,
so the choice does not change, but a notice reports the batch with larger tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.units import format_bytes
from roomier.plan.parts import ActivationPlan
from roomier.techniques.activation.block_forward import BlockForward, Keep, Recompute
from roomier.techniques.activation.budget_choice import Stage, choose, least_peak_bytes, lost_ns, peak_bytes
from roomier.techniques.activation.live_bytes import LiveBytes
from roomier.techniques.activation.profile import Recorder
from roomier.techniques.activation.stages import (
    MOVED,
    WAYS,
    Profile,
    Way,
    profile_of,
    with_equal_times,
    with_lost_ns,
    worst_of,
)

_MEASURED_STEP = 2
_LAST_ATTEMPT = 5  # last step that can be measured; skipped steps are not measured

Sizes = tuple[int, ...]


class Estimates(Protocol):
    """Protocol of the values that replace measurements in a dry run, in which tensors have no memory and operations
    take no time."""

    def live_bytes(self) -> LiveBytes:
        """Return the object that measures the memory in use."""
        ...

    def lost_ns(self, block: int, keep: Keep) -> int:
        """Return the time per step, in nanoseconds, that recomputation of the block with index ``block`` takes if the
        block saves the activations that ``keep`` selects."""
        ...


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
        self._copy_times = None if offload is None else offload.copy_times()
        self._place = "" if offload is None else offload.place
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
            if not _is_larger(sizes, self._sizes):
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
            for leaf in torch_private.iter_leaves([optimizer.param_groups, list(optimizer.state.values())]):
                if isinstance(leaf, Tensor):
                    self._recorder.live.note(leaf)

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
        self.lost_ns = lost_ns(stages, choice)
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
        leaves = torch_private.iter_leaves(batch)
        sizes = _larger_of(sizes, tuple(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)))
    return sizes


def _larger_of(first: Sizes, second: Sizes) -> Sizes:
    return tuple(max(pair) for pair in zip_longest(first, second, fillvalue=0))


def _is_larger(sizes: Sizes, known: Sizes) -> bool:
    return _larger_of(sizes, known) != _larger_of(known, ())
