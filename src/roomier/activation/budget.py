"""Blocks that keep as much as a budget of memory allows, on the device or in host memory, chosen from one step that is
measured.

[Note: when the choice is made]
In the first step each block keeps its input alone, the least there is, and the optimizers make their states. The second
does the same and is measured (:mod:`roomier.activation.profile`). Before the third the choice is made
(:mod:`roomier.activation.choose`), on several ranks for the worst of each number on all of them, so that all make the
same one. Whatever is kept, the gradients are the same bits, so nothing else depends on when this happens.

A step with larger tensors in its batch than any that was measured is measured again, on one rank; its choice is for the
largest of both. On several ranks, where others do not know of it, the choice stays, and a line says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roomier.activation.block_forward import BlockForward, Keep, Recompute
from roomier.activation.choose import Stage, choose, least_peak_bytes, lost_ns, peak_bytes
from roomier.activation.profile import Recorder
from roomier.activation.stages import MOVED, WAYS, Profile, Way, profile_of, with_equal_times, worst_of
from roomier.core import torch_private
from roomier.core.errors import TrainingError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.units import format_bytes
from roomier.plan.parts import ActivationPlan

_MEASURED_STEP = 2
_LAST_ATTEMPT = 5  # a step may have been left out, and measured nothing

Sizes = tuple[int, ...]


class BudgetedRecompute(Recompute):
    """Changes what ``blocks`` keep, between steps; see [Note: when the choice is made].

    Args:
        blocks: that also may keep all in host memory, where they have an ``offload``.
        activation: with ``budget_bytes`` or ``budget_fraction``.
        device: whose memory is counted.
        ranks: that make the same choice.

    Attributes:
        predicted_bytes: the peak of a step as chosen, on the rank where it is highest; None before.
        lost_ns: time of a step for what is computed again, and for copies that no computation hides; None before.
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
        self._activation = activation
        self._device = device
        self._ranks = ranks
        offload = blocks[0].offload
        self._copy_times = None if offload is None else offload.copy_times()
        self._num_steps = 0
        self._profile: Profile | None = None
        self._recorder: Recorder | None = None
        self._is_recorded = False
        self._sizes: Sizes = ()  # the largest that were measured
        self._has_told = False
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
                self._tell_larger(sizes)
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
        self._recorder = Recorder(self.blocks, self._device)
        self._recorder.start()
        for optimizer in optimizers:
            for leaf in torch_private.iter_leaves([optimizer.param_groups, list(optimizer.state.values())]):
                if isinstance(leaf, Tensor):
                    self._recorder.live.note(leaf)

    def _decide(self) -> None:
        assert self._recorder is not None
        self._recorder.note_update()
        profiles = self._ranks.gather(profile_of(self._recorder, self._copy_times))
        self._recorder, self._is_recorded = None, False
        if len({profile.order for profile in profiles}) > 1:
            problem = "the ranks ran other blocks, or in another order, and cannot choose alike"
            action = "Use activation_checkpointing='full' or 'selective'"
            raise TrainingError("activation.policy", "budget", problem, action)
        if not profiles[0].order and self._num_steps <= _LAST_ATTEMPT:
            return  # a step that was left out: the next one is measured
        earlier = [] if self._profile is None or self._profile.order != profiles[0].order else [self._profile]
        is_first = self._profile is None
        self._profile = worst_of([*profiles, *earlier])
        self._choose(with_equal_times(self._profile.stages), is_first)

    def _choose(self, stages: Sequence[Stage], is_first: bool) -> None:
        assert self._profile is not None
        budget_bytes = self._budget_bytes(stages)
        choice = choose(stages, budget_bytes)
        if choice is None:
            least_bytes = least_peak_bytes(stages)
            if is_first:
                raise _too_small(budget_bytes, least_bytes)
            notice(f"the larger batch does not fit into {format_bytes(budget_bytes)}: each block keeps the least")
            choice = choose(stages, least_bytes)
            assert choice is not None
        for block, index in zip(self._profile.order, choice[1:], strict=True):
            self.blocks[block].keep, self.blocks[block].offloads = WAYS[index]
        self.predicted_bytes = peak_bytes(stages, choice)
        self.lost_ns = lost_ns(stages, choice)
        self._tell_choice(budget_bytes, [WAYS[index] for index in choice[1:]])

    def _budget_bytes(self, stages: Sequence[Stage]) -> int:
        if self._activation.budget_bytes is not None:
            return self._activation.budget_bytes
        assert self._activation.budget_fraction is not None
        least_bytes = peak_bytes(stages, [0] * len(stages))
        most_bytes = peak_bytes(stages, [0] + [WAYS.index(Way(Keep.ALL))] * (len(stages) - 1))
        # Keeping all may take less: nothing is computed a second time.
        return least_bytes + round(self._activation.budget_fraction * max(most_bytes - least_bytes, 0))

    def _tell_choice(self, budget_bytes: int, ways: Sequence[Way]) -> None:
        assert self.predicted_bytes is not None
        assert self.lost_ns is not None
        counts = Counter(ways)
        names = {
            Way(Keep.ALL): "all",
            MOVED: "all in host memory",
            Way(Keep.PRODUCTS): "the results of products",
            Way(Keep.INPUT): "their input alone",
        }
        parts = [f"{counts[way]} keep {name}" for way, name in names.items() if counts[way]]
        notice(
            f"activation budget of {format_bytes(budget_bytes)}: of {len(self.blocks)} blocks "
            f"{', '.join(parts) or 'none keeps anything for a backward'}; "
            f"predicted peak {format_bytes(self.predicted_bytes)}; "
            f"about {self.lost_ns / 1e6:.1f} ms of a step {'compute again' if self._copy_times is None else 'are lost'}"
        )

    def _tell_larger(self, sizes: Sizes) -> None:
        if not self._has_told:
            self._has_told = True
            notice(
                f"rank {self._ranks.world.rank} got a batch with tensors of {sizes} elements, larger than the "
                f"{self._sizes} that the activation budget was measured with: it may be exceeded",
                every_rank=True,
            )


def _too_small(budget_bytes: int, least_bytes: int) -> TrainingError:
    problem = (
        f"the peak of a step is {least_bytes / 2**30:.3g} GiB ({format_bytes(least_bytes)}) at the least, where blocks "
        "keep their input alone"
    )
    action = (
        "Raise the budget; or use smaller micro-batches (with accumulate_grad_batches), chunked_loss=True where the "
        "logits are large, or strategy='zero2' on several ranks"
    )
    return TrainingError("activation.budget", f"{format_bytes(budget_bytes)}", problem, action)


def _sizes_of(batches: Sequence[Any]) -> Sizes:
    """Elements of each tensor of a micro-batch, the most in any of ``batches``."""
    sizes: Sizes = ()
    for batch in batches:
        leaves = torch_private.iter_leaves(batch)
        sizes = _larger_of(sizes, tuple(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)))
    return sizes


def _larger_of(first: Sizes, second: Sizes) -> Sizes:
    return tuple(max(pair) for pair in zip_longest(first, second, fillvalue=0))


def _is_larger(sizes: Sizes, known: Sizes) -> bool:
    return _larger_of(sizes, known) != _larger_of(known, ())
