"""StragglerMonitor: callback that names a rank that computes more slowly than the others, and the block where it does.

[Note: slow ranks]
All ranks wait for the slowest one in each collective, so the time of a step is equal on all ranks and does not show
which of them is slow. The callback therefore measures computation only. The forward pass of a block is measured between
the hooks of ``fully_shard``, which wait for all-gathers. The backward pass is measured from the gradient of the block's
output, after its parameters are gathered, to the gradient of its input, before gradients are reduced.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.core.device.streams import synchronize, timed_event
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.tree import tensors

_NUM_STEPS = 5


class StragglerMonitor(Callback):
    """Callback that measures the computation of each block on each rank in the last steps before a log step, and prints
    a line if a rank is slower than the others. See [Note: slow ranks].

    A block is compared between the ranks that compute it, by its fastest measured step, because a slow rank is slow in
    each step. Only forward and backward passes of blocks are measured. If the ranks compute different numbers of
    tokens, they differ without a fault.

    Args:
        threshold: smallest reported difference, as a fraction of the time of a typical rank.

    Raises:
        RoomierError: ``threshold`` is not positive, or ranks share sequences (``context_parallel_size``), so that they
            wait for each other within blocks.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[StragglerMonitor()])
    """

    reads_parameters = False

    def __init__(self, threshold: float = 0.15) -> None:
        if not threshold > 0:
            raise RoomierError("threshold", threshold, "must be positive", "Use a fraction such as 0.15")
        self.threshold = threshold
        self._blocks: dict[str, nn.Module] = {}
        self._hooks: list[RemovableHandle] = []
        self._spans: dict[str, list[list[Any]]] = defaultdict(list)  # start and end of each pass in a step, by place
        self._of_steps: list[dict[str, list[list[Any]]]] = []
        self._step = 0

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.ranks.mesh.context > 1:
            problem = "cannot measure blocks in which ranks wait for each other"
            raise RoomierError("callbacks", type(self).__name__, problem, "Remove it, or use context_parallel_size=1")
        engine = trainer.engine
        blocks = set() if trainer.ranks.is_alone else {*engine.blocks}
        self._blocks = {
            name: each
            for name, each in engine.module.named_modules()
            if each in blocks and not any(parameter.is_meta for parameter in each.parameters())
        }
        self._device = pl_module.device
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        num_left = -trainer.global_step % trainer.log_every_n_steps or trainer.log_every_n_steps
        if num_left <= _NUM_STEPS and not self._hooks:
            for name, block in self._blocks.items():
                self._measure(name, block)

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        if trainer.global_step == self._step:  # between the micro-batches of a step
            return
        self._step = trainer.global_step
        if self._hooks:
            self._of_steps.append(self._spans)
            self._spans = defaultdict(list)
        if self._step % trainer.log_every_n_steps == 0:
            self._remove_hooks()
            synchronize(self._device)
            times_s: dict[str, float] = {}
            for spans_of_step in self._of_steps:
                for place, spans in spans_of_step.items():
                    time_s = sum(_duration_s(*each) for each in spans if len(each) == 2)
                    times_s[place] = min(time_s, times_s.get(place, time_s))
            self._of_steps.clear()
            if found := stragglers(trainer.ranks.gather(times_s), self.threshold):
                notice(", ".join(found))

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._remove_hooks()
        self._blocks.clear()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _measure(self, name: str, block: nn.Module) -> None:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():
                self._spans[f"forward of {name}"].append([self._now()])
                _on_gradient((args, kwargs), partial(self._end, f"backward of {name}"))

        def computed(*_: Any) -> None:
            if torch.is_grad_enabled():
                self._end(f"forward of {name}")

        def after(_: Any, __: Any, output: Any) -> None:
            _on_gradient(output, lambda _: self._spans[f"backward of {name}"].append([self._now()]))

        self._hooks += [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(computed, prepend=True),
            block.register_forward_hook(after),
        ]

    def _end(self, place: str, *_: Any) -> None:
        spans = self._spans[place]
        if spans and len(spans[-1]) == 1:
            spans[-1].append(self._now())

    def _now(self) -> Any:
        return time.perf_counter() if self._device.type == "cpu" else timed_event(self._device)


def stragglers(times_s: Sequence[Mapping[str, float]], threshold: float) -> list[str]:
    """Return a text such as ``"rank 3: 18% more compute in backward of layers.7"`` for each rank that is slower than
    the others, with the place of its largest loss of time.

    Args:
        times_s: for each rank, the times in seconds by place.
        threshold: smallest difference that counts, as a fraction of the lower median over the ranks.
    """
    places = {*chain.from_iterable(times_s)}
    typical = {place: median_low(times[place] for times in times_s if place in times) for place in places}
    found = []
    for rank, times in enumerate(times_s):
        lost_s = {place: each - typical[place] for place, each in times.items()}
        slow = [place for place, each in lost_s.items() if each > threshold * typical[place]]
        if slow:
            worst = max(slow, key=lambda place: lost_s[place])
            where = worst if len(slow) < len(times) / 2 else f"most blocks, most of all in {worst}"
            found.append(f"rank {rank}: {lost_s[worst] / typical[worst]:.0%} more compute in {where}")
    return found


def _on_gradient(tree: Any, hook: Callable[[Tensor], None]) -> None:
    """Register ``hook`` for the gradient of the first tensor in ``tree`` that has one."""
    trained: list[Tensor] = [each for each in tensors(tree) if each.requires_grad]
    if trained:
        trained[0].register_hook(hook)  # type: ignore[no-untyped-call]


def _duration_s(start: Any, end: Any) -> float:
    duration_s: float = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
    return duration_s
