"""PowerSGD: gradients of matrices travel as two thin factors, with torch's hook for DDP."""

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # it is there, under a condition
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from roomier.core.log import notice

DEFAULT_RANK = 4
DEFAULT_WARMUP_STEPS = 100
_FIRST_STEPS_WHOLE = 3  # one by hand before DDP is made, and two in which DDP arranges its buckets
_LEAST_NORM = 1e-8  # of a column that is made orthogonal: gradients may be zero


class PowerSGD:
    """Vogels et al. 2019 (arXiv 1905.13727), with error feedback and the factors of the step before as a start.

    What the factors leave out stays on each rank for the next step. It is not stored: after a resume it is zero, and
    gradients travel whole for the warm-up again.

    [Note: one bucket at a time on the CPU]
    The second and third collective of a bucket begin in a callback of the one before. gloo runs callbacks on threads of
    its own, so with several buckets under way the ranks would begin them in different orders, and sums would mix.

    Args:
        rank: of the factors: ``n x m`` numbers become ``rank * (n + m)``, where these are at most half as many.
        warmup_steps: in which gradients travel whole; at least 3.
    """

    def __init__(self, rank: int | None, warmup_steps: int | None) -> None:
        self._rank = DEFAULT_RANK if rank is None else rank
        warmup_steps = DEFAULT_WARMUP_STEPS if warmup_steps is None else warmup_steps
        self._warmup_steps = max(warmup_steps, _FIRST_STEPS_WHOLE)
        self._is_told = False

    def register(self, ddp: DistributedDataParallel) -> None:
        """Let ``ddp``, of which the first step was done without it, send in this way."""
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=self._warmup_steps - 1,
            orthogonalization_epsilon=_LEAST_NORM,
        )
        ddp.register_comm_hook(state, self._send)
        notice(
            f"powersgd: gradients travel whole for the first {self._warmup_steps} steps of this run, then as factors "
            f"of rank {self._rank}; what these leave out is not stored, so a resumed run begins in this way again"
        )

    def _send(self, state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        sent = powerSGD_hook(state, bucket)
        if bucket.buffer().is_cpu:
            sent.wait()
        if not self._is_told and bucket.is_last() and state.total_numel_before_compression:
            self._is_told = True
            before, after = state.total_numel_before_compression, state.total_numel_after_compression
            notice(
                f"powersgd: from here on {after} numbers travel a step in the place of {before}, "
                f"{before / after:.1f} times less"
            )
        return sent
