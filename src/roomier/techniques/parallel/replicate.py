"""DDP: every rank stores the full model, and gradients are averaged during the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from roomier.core import torch_fake, torch_private
from roomier.core.errors import RoomierError, TrainingError
from roomier.core.ranks import Ranks, announce, close_connections
from roomier.core.sharded import local_part
from roomier.plan.choices import compression_named
from roomier.plan.parts import ParallelPlan
from roomier.techniques.parallel.agree import take_values_of_rank_zero
from roomier.techniques.parallel.parallel import Parallel, StepRunner

_NO_COMPRESSION = "Set gradient_compression='none'"


class Replicas(Parallel):
    """A network that every rank stores in full, with the methods that the engine calls in each step.

    DDP averages gradients over the ranks, but the engine weights losses for a sum over the ranks. Therefore, the engine
    also multiplies the losses by the number of ranks.

    [Note: parameters without a gradient]
    When DDP is constructed, an option states whether some parameters may receive no gradient. With this option, DDP
    checks for such parameters in every step, which takes time. The first step therefore runs without DDP, and its
    gradients are averaged directly, which shows the parameters that have no gradient. DDP is constructed at the start
    of the second step, so its buckets never exist at the same time as the gradients of the first step. DDP checks for
    unused parameters in every step if a parameter was unused in the first step, or if ``find_unused_parameters`` is
    set. Otherwise, an unused parameter in a later step raises an error that names the parameter.

    Args:
        network: model with the same values on every rank.
        device: device of the model.
        ranks: all ranks of the run.
        by_hand: whether the module uses manual optimization. If so, gradients are averaged after each backward pass
            inside ``training_step``.
        wanted: plan that contains the compression of gradients, and whether steps may leave parameters unused.
        wire_dtype: dtype in which gradients are sent; None uses the dtype of each gradient.

    Attributes:
        runner: module that runs a step in its ``forward``.
        loss_factor: the number of ranks, by which DDP divides the gradients.

    Raises:
        RoomierError: gradients are compressed, and the module uses manual optimization.
    """

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        ranks: Ranks,
        *,
        by_hand: bool,
        wanted: ParallelPlan,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._compression_name = wanted.gradient_compression
        compression = compression_named(self._compression_name)
        if compression is not None and by_hand:
            problem = "is not supported with manual optimization, which does not run the backward pass of DDP"
            raise RoomierError("gradient_compression", self._compression_name, problem, _NO_COMPRESSION)
        self.runner: nn.Module = StepRunner(network)
        self.loss_factor = float(ranks.world.size)
        self._network = network
        self._device = device
        self._ranks = ranks
        self._by_hand = by_hand
        self._finds_unused = wanted.find_unused_parameters
        self._wire_dtype = wire_dtype
        self._compression = None if compression is None else compression.load()(wanted)
        self._ddp: DistributedDataParallel | None = None
        self._is_last = True
        self._wraps_next = False
        self._trained = [each for each in network.parameters() if each.requires_grad]

    def begin_micro_batch(self, *, is_first: bool, is_last: bool) -> None:
        """Construct DDP if necessary, and enable its reduction only for the last micro-batch of a step."""
        self._is_last = is_last
        if self._wraps_next and torch.is_grad_enabled():  # an evaluation can have fewer steps on some ranks
            self._wrap()
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = is_last

    def end_backward(self) -> None:
        """Average the gradients if DDP does not exist yet, and check that no gradient is missing.

        Raises:
            TrainingError: a parameter has no gradient in this step, but it had a gradient in the first step.
        """
        if not self._is_last:
            return
        if self._ddp is None:
            size = self._ranks.world.size
            is_unused = reduce_gradients(self._trained, self._ranks, self._wire_dtype, divisor=size)
            self._finds_unused |= is_unused
            self._wraps_next = not self._by_hand
        elif not self._finds_unused:
            unreduced = torch_private.unreduced_parameters(self._ddp)
            if unreduced is not None:
                error = self._left_out(unreduced)
                announce(error)
                close_connections()  # ranks that have all gradients wait for the reduction
                raise error

    def trained_parameters_changed(self) -> None:
        """Discard DDP if parameters were frozen or unfrozen, because DDP averages a fixed set of parameters. The next
        step averages gradients directly, and the following step constructs DDP again.

        Raises:
            RoomierError: gradient compression is enabled, and its stored errors belong to the previous set of
                parameters.
        """
        trained = [each for each in self._network.parameters() if each.requires_grad]
        if {id(each) for each in trained} == {id(each) for each in self._trained}:
            return
        self._trained = trained
        if self._ddp is None:
            return
        if self._compression is not None:
            problem = "does not support freezing or unfreezing parameters during a run"
            action = f"{_NO_COMPRESSION}, or keep the set of trained parameters"
            raise RoomierError("gradient_compression", self._compression_name, problem, action)
        self.runner, self._ddp, self._wraps_next = self._ddp.module, None, False

    def _wrap(self) -> None:
        self._wraps_next = False
        runner = self.runner
        assert isinstance(runner, StepRunner)
        if self._finds_unused:
            # torch warns if all parameters are used in a step, so this parameter, which is always unused, is added.
            runner.register_parameter("never_used", nn.Parameter(torch.zeros(1, device=self._device)))
        # DDP broadcasts buffers in each forward pass. The codes of frozen quantized weights never change.
        constant = ((prefix, getattr(each, "constant_buffers", ())) for prefix, each in runner.named_modules())
        torch_private.leave_out_of_ddp(runner, [f"{prefix}.{name}" for prefix, names in constant for name in names])
        wrap: type[DistributedDataParallel] = DistributedDataParallel
        if torch_fake.is_fake(self._trained):
            wrap = cast(Any, FakeDDP)
        self.runner = self._ddp = wrap(
            runner,
            device_ids=None if self._device.type == "cpu" else [self._device.index],
            gradient_as_bucket_view=True,  # without this option, each gradient exists twice in memory
            find_unused_parameters=self._finds_unused,
        )
        if self._compression is not None:
            self._compression.register(self._ddp)
        elif self._wire_dtype is not None:
            self._ddp.register_comm_hook(self._wire_dtype, send_rounded)

    def _left_out(self, unreduced: Sequence[int]) -> TrainingError:
        assert self._ddp is not None
        trained = [name for name, each in self._ddp.module.network.named_parameters() if each.requires_grad]
        problem = f"has no gradient in this step on rank {dist.get_rank()}, but had one in the first step"
        action = (
            "If steps leave parameters unused, set Trainer(strategy={'name': 'ddp', 'find_unused_parameters': True})"
        )
        return TrainingError("training_step", [trained[each] for each in unreduced[:5]], problem, action)


def reduce_gradients(
    parameters: Sequence[Tensor],
    ranks: Ranks,
    wire_dtype: torch.dtype | None = None,
    *,
    divisor: int = 1,
) -> bool:
    """Sum the gradients of ``parameters``, or this rank's shards of them, over all ranks, and divide them by
    ``divisor``, in place.

    A gradient that is missing on some ranks counts as zero.

    Args:
        parameters: parameters in the same order on every rank.
        ranks: ranks that have these parameters.
        wire_dtype: dtype in which gradients are sent; None uses the dtype of each gradient.
        divisor: number by which the sums are divided.

    Returns:
        True if a gradient was missing on any rank. A gradient that is missing on all ranks remains None.
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
        gradients = [local_part(each.grad) for each in group if each.grad is not None]
        flat = torch.cat([each.flatten() for each in gradients]).to(wire_dtype)
        dist.all_reduce(flat, group=ranks.process_group)
        flat /= divisor
        for gradient, part in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return any(count < ranks.world.size for count in counts)


def _dtype_name(parameter: Tensor) -> str:
    return str(parameter.dtype)


def send_rounded(dtype, bucket):  # type: ignore[no-untyped-def]  # DDP rejects the text that annotations are here
    """All-reduce the gradients of ``bucket`` in ``dtype``, as a communication hook for DDP.

    torch provides ``bf16_compress_hook``, which DDP rejects on a CPU.
    """
    gradients: Tensor = bucket.buffer()
    rounded = gradients.to(dtype).div_(dist.get_world_size())

    def restore(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(reduced.value()[0])

    future: torch.futures.Future[Tensor] = dist.all_reduce(rounded, async_op=True).get_future().then(restore)
    return future


class FakeDDP(nn.Module):
    """Wrapper that allocates and frees the same memory as ``DistributedDataParallel`` with ``gradient_as_bucket_view``.

    No data is communicated. The buckets are allocated at construction. In a backward pass that reduces gradients, each
    complete gradient is copied into its bucket and becomes a view of the bucket. In a backward pass that does not
    reduce gradients, they accumulate outside the buckets.

    Args:
        module: wrapped module.
        **options: additional arguments of DDP, which are ignored.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self._buckets = {each: torch.empty_like(each) for each in module.parameters() if each.requires_grad}
        for parameter in self._buckets:
            parameter.register_post_accumulate_grad_hook(self._into_bucket)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module."""
        return self.module(*args, **kwargs)

    def register_comm_hook(self, state: object, hook: object) -> None:
        """Ignore the hook. The memory of the compressed gradients is not counted."""

    def _check_reducer_finalized(self) -> None:
        """Accept missing gradients."""

    @torch.no_grad()
    def _into_bucket(self, parameter: Tensor) -> None:
        if self.require_backward_grad_sync and parameter.grad is not None:
            bucket = self._buckets[parameter]  # type: ignore[index]  # torch declares the hook for any tensor
            bucket.copy_(parameter.grad)
            parameter.grad = bucket


NORMS_WITH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d)


class OwnGradients(Parallel):
    """Strategy without gradient communication in the backward pass. The optimizer communicates instead (1-bit Adam).

    Every rank stores the full model and the gradients of its own batches.

    Args:
        network: unsharded model. Its parameters and buffers are overwritten with the values from rank 0.
        ranks: all ranks of the run.

    Attributes:
        runner: module that runs a step in its ``forward``.
        loss_factor: the number of ranks, because the optimizer averages over the ranks.
    """

    def __init__(self, network: nn.Module, ranks: Ranks) -> None:
        take_values_of_rank_zero(network, ranks)
        self.runner: nn.Module = StepRunner(network)
        self.loss_factor = float(ranks.world.size)
        norms = [each for each in network.modules() if isinstance(each, NORMS_WITH_STATISTICS)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]

    def end_update(self) -> None:
        """Copy the running statistics from rank 0, as DDP does. All other tensors are already identical."""
        for buffer in self._statistics:
            dist.broadcast(buffer, src=0)

    def check_reduced(self, field: str, value: object) -> None:
        problem = (
            "is not supported with onebit_adam, which sends the signs of the momentum and never has the full gradient"
        )
        raise TrainingError(field, value, problem, "Remove it, or use optimizer='adamw'")
