"""All-gather and reduce-scatter for ranks on gloo, beside the computation.

Each rank sends each other rank the one part it needs. gloo's own collectives go through full-size copies: 8 Mi floats
on two ranks over loopback take 30 ms to gather and 40 ms to reduce there, 10 and 11 ms here (2 cores, torch 2.13). On a
CPU ``fully_shard`` has no streams, so what runs beside the computation is told here: a gather is waited for when its
result is unpacked, a reduction when the next one begins or the backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core import torch_private
from roomier.core.errors import TrainingError

PATIENCE = timedelta(minutes=15)  # longer than hang_timeout by default, whose error names the late rank


class PairwiseAllGather:
    """What :meth:`FSDPModule.set_custom_all_gather` takes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        parts = list(output_tensor.chunk(group.size()))
        work = exchange([input_tensor] * group.size(), parts, group)
        own = parts[group.rank()]
        if not torch_private.is_same_memory(own, input_tensor):
            own.copy_(input_tensor)
        return _AllOf(work)


class Reductions:
    """The reduction that was begun and is not yet waited for, of all units of a model.

    Attributes:
        window: number of the optimizer step that is running.
    """

    def __init__(self) -> None:
        self.window = 0
        self._finish: Callable[[], None] | None = None

    def begin(self, finish: Callable[[], None]) -> None:
        """Take over a reduction, of which ``finish`` does the rest; the one before is finished first."""
        self.finish()
        self._finish = finish

    def finish(self) -> None:
        """Do the rest of what was begun."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class PairwiseReduceScatter:
    """What :meth:`FSDPModule.set_custom_reduce_scatter` takes. Parts travel in ``wire_dtype`` and are added up in the
    dtype of the result, in the order of the ranks, so that every rank adds in one order.

    ``fully_shard`` makes gradients of the result without looking at it, unless it adds them to those of an earlier
    micro-batch or of an earlier use of the unit. So the first reduction of a unit in a step may come in later.

    Args:
        reductions: shared by all units of a model.
        may_wait: False where ``fully_shard`` goes on to compute with each result.
        wire_dtype: None sends what is there.
    """

    def __init__(self, reductions: Reductions, *, may_wait: bool, wire_dtype: torch.dtype | None = None) -> None:
        self._reductions = reductions
        self._may_wait = may_wait
        self._wire_dtype = wire_dtype
        self._num_sent = 0
        self._last_window = reductions.window

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # fully_shard asks for what is sent, and then for the smaller result.
        (num_elements,) = size
        is_result = 0 < num_elements < self._num_sent
        self._num_sent = 0 if is_result else num_elements
        if not is_result and self._wire_dtype is not None:
            dtype = self._wire_dtype
        return torch.empty(num_elements, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM
        parts, rank = list(input_tensor.chunk(group.size())), group.rank()
        received = [part if index == rank else torch.empty_like(part) for index, part in enumerate(parts)]
        work = exchange(parts, received, group)

        def finish() -> None:
            wait_for(work)
            output_tensor.copy_(received[0])
            for part in received[1:]:
                output_tensor.add_(part)

        self._reductions.begin(finish)
        if not self._may_wait or self._last_window == self._reductions.window:
            self._reductions.finish()
        self._last_window = self._reductions.window


def exchange(sent: list[Tensor], received: list[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send ``sent[i]`` to rank i of ``group`` and to receive ``received[i]`` from it, for all other ranks."""
    operations = [
        dist.P2POp(function, tensors[peer], group=group, group_peer=peer)
        for peer in range(group.size())
        if peer != group.rank()
        for function, tensors in ((dist.isend, sent), (dist.irecv, received))
    ]
    work: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return work


def wait_for(work: Sequence[dist.Work]) -> None:
    """Wait until all of ``work`` is done.

    Raises:
        TrainingError: another rank did not send its part within ``PATIENCE``.
    """
    try:
        for each in work:
            each.wait(PATIENCE)
    except RuntimeError as error:
        # The second is what gloo says to all that comes after the first, as where an evaluation frees what it gathered.
        if not any(told in str(error).lower() for told in ("timed out", "timeout caused pair closure")):
            raise
        raise TrainingError(
            "strategy",
            f"rank {dist.get_rank()}",
            f"waited {PATIENCE} for a part that another rank did not send: it is stuck, or it left out a layer",
            "See what the other ranks do; where steps leave out layers, set find_unused_parameters in the strategy",
        ) from error


class _AllOf(dist.Work):
    """Several pieces of work as one."""

    def __init__(self, work: Sequence[dist.Work]) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        wait_for(self._work)
        return True
