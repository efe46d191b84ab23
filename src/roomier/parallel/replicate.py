"""DDP: every rank holds the whole model, and gradients are averaged while the backward still runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from roomier.core import torch_fake, torch_private
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.ranks import Ranks
from roomier.parallel.fake_ddp import FakeDDP
from roomier.parallel.powersgd import PowerSGD
from roomier.parallel.rounded import send_rounded
from roomier.parallel.runner import StepRunner


class Replicas:
    """A network that every rank holds: what the engine tells it at each step.

    torch's DDP averages over the ranks; the engine weighs its losses for a sum and multiplies by their number.

    [Note: parameters without a gradient]
    DDP must be told before the first step whether some parameters may get none, and pays for looking at each step. So
    the first step is taken without it: which gradients there are is looked at, and they are averaged by hand. DDP is
    made when the next step begins: its buckets never stand beside the gradients of the first. A model that leaves out a
    parameter in the first step, or is said to (``finds_unused``), is looked at in each; one that does so only later is
    refused, by name.

    Args:
        by_hand: gradients are averaged after each backward, since it runs within a training step (manual optimization).
        finds_unused: a step may leave out parameters, others on other ranks.
        wire_dtype: in which gradients travel; None as they are.
        compression: how they are made smaller; None for not at all.

    Attributes:
        runner: calls steps.
        loss_factor: the number of ranks, which DDP divides by.
    """

    allows_inference_mode = True
    trace = 0  # each rank runs what it likes
    late_parameters: Sequence[nn.Parameter] = ()

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        ranks: Ranks,
        *,
        by_hand: bool,
        finds_unused: bool,
        wire_dtype: torch.dtype | None,
        compression: PowerSGD | None,
    ) -> None:
        if compression is not None and by_hand:
            problem = "needs automatic optimization: DDP's backward, which it is a part of, does not run here"
            raise RoomierError("gradient_compression", "powersgd", problem, "Leave it 'none'")
        self.runner: nn.Module = StepRunner(network)
        self.loss_factor = float(ranks.world.size)
        self._network = network
        self._device = device
        self._ranks = ranks
        self._by_hand = by_hand
        self._finds_unused = finds_unused
        self._wire_dtype = wire_dtype
        self._compression = compression
        self._ddp: DistributedDataParallel | None = None
        self._is_last = True
        self._wraps_next = False
        self._trained = [each for each in network.parameters() if each.requires_grad]

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Before the forward of each micro-batch of a step."""
        self._is_last = is_last
        if self._wraps_next and torch.is_grad_enabled():  # not for an evaluation, which some ranks may have less of
            self._wrap()
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = is_last

    def begin_backward(self) -> None:
        """Before each backward."""

    def end_backward(self) -> None:
        """After each backward.

        Raises:
            TrainingError: a parameter got no gradient that got one before.
        """
        if not self._is_last:
            return
        if self._ddp is None:
            is_unused = average_gradients(self._trained, self._ranks, self._wire_dtype)
            self._finds_unused |= is_unused
            self._wraps_next = not self._by_hand
        elif not self._finds_unused and any(each.grad is None for each in self._trained):
            raise self._left_out()

    def end_update(self) -> None:
        """After each update of the parameters."""

    def release(self) -> None:
        """Nothing is gathered."""

    def trained_parameters_changed(self) -> None:
        """Some were frozen or unfrozen since the last step: DDP, which averages those it was made with, is made anew.

        Raises:
            RoomierError: what compressed gradients left out belongs to the parameters there were.
        """
        trained = [each for each in self._network.parameters() if each.requires_grad]
        if {id(each) for each in trained} == {id(each) for each in self._trained}:
            return
        self._trained = trained
        if self._ddp is None:
            return
        if self._compression is not None:
            problem = "holds what was left out of gradients that were sent; other parameters are trained from here on"
            raise RoomierError("gradient_compression", "powersgd", problem, "Leave it 'none', or unfreeze nothing")
        self.runner, self._ddp, self._wraps_next = self._ddp.module, None, False

    def clip_grad_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value_(self, parameters: Sequence[Tensor], max_value: float) -> None:
        nn.utils.clip_grad_value_(parameters, max_value)

    def join_norms(self, norms: Mapping[Tensor, Tensor]) -> Tensor:
        return torch_private.join_norms(list(norms.values()))

    def _wrap(self) -> None:
        self._wraps_next = False
        runner = self.runner
        assert isinstance(runner, StepRunner)
        if self._finds_unused:
            # torch warns where it looked for unused parameters and found none in a step: this one it always finds.
            runner.register_parameter("never_used", nn.Parameter(torch.zeros(1, device=self._device)))
        torch_private.leave_out_of_ddp(runner, _constant_buffers(runner))
        wrap: type[DistributedDataParallel] = DistributedDataParallel
        if torch_fake.is_fake(self._trained):
            wrap = cast(Any, FakeDDP)
        self.runner = self._ddp = wrap(
            runner,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # else gradients stand in memory twice
            find_unused_parameters=self._finds_unused,
        )
        if self._compression is not None:
            self._compression.register(self._ddp)
        elif self._wire_dtype is not None:
            self._ddp.register_comm_hook(self._wire_dtype, send_rounded)

    def _left_out(self) -> TrainingError:
        assert self._ddp is not None
        names = [
            name
            for name, each in self._ddp.module.network.named_parameters()
            if each.requires_grad and each.grad is None
        ]
        problem = f"got no gradient in this step on rank {dist.get_rank()}, and got one in the first"
        action = (
            "Tell that steps leave out parameters: Trainer(strategy={'name': 'ddp', 'find_unused_parameters': True})"
        )
        return TrainingError("training_step", names[:5], problem, action)


def _constant_buffers(module: nn.Module) -> list[str]:
    # DDP sends buffers to all ranks in each forward; codes of frozen weights never change.
    names = ((prefix, getattr(each, "constant_buffers", ())) for prefix, each in module.named_modules())
    return [f"{prefix}.{name}" for prefix, own in names for name in own]


def average_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks, wire_dtype: torch.dtype | None = None) -> bool:
    """Average the gradients of ``parameters`` over all ranks, in place; one that is missing on some counts as zero.

    Args:
        wire_dtype: in which they travel; None as they are.

    Returns:
        Whether one was missing on any rank. A gradient that is missing on all stays so.
    """
    num_with = torch.tensor([float(each.grad is not None) for each in parameters])
    if parameters:
        num_with = ranks.sum(num_with.to(parameters[0].device))
    counts = num_with.tolist()
    used = [each for each, count in zip(parameters, counts, strict=True) if count]
    for each in used:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
    for _, group in groupby(sorted(used, key=_dtype_name), _dtype_name):
        _average([each.grad for each in group if each.grad is not None], wire_dtype)
    return any(count < ranks.world.size for count in counts)


def _average(gradients: list[Tensor], wire_dtype: torch.dtype | None) -> None:
    flat = torch.cat([each.flatten() for each in gradients]).to(wire_dtype)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _dtype_name(parameter: nn.Parameter) -> str:
    return str(parameter.dtype)
