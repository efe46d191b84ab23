"""PowerSGD, which uses torch's hook for DDP to send the gradient of each matrix as two low-rank factors."""

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch defines it conditionally
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from roomier.core.log import notice

DEFAULT_RANK = 4
DEFAULT_WARMUP_STEPS = 100
_FIRST_STEPS_WHOLE = 3  # one step before DDP is constructed, and two steps in which DDP arranges its buckets
_LEAST_NORM = 1e-8  # added to the norm of each column in orthogonalization, because gradients can be zero


class PowerSGD:
    """Low-rank gradient compression (Vogels et al. 2019, arXiv 1905.13727) with error feedback and warm start.

    Each rank adds the approximation error to the gradient of the next step. The approximation error is not part of a
    checkpoint. A resumed run starts with an approximation error of zero and repeats the warm-up.

    [Note: one bucket at a time on the CPU]
    The second and third collectives of a bucket each start in a callback of the previous collective. gloo runs
    callbacks on separate threads. If several buckets were processed at the same time, the ranks could start the
    collectives in different orders, and sums would mix different tensors.

    Args:
        rank: rank of the factors. A matrix of ``n x m`` elements is sent as ``rank * (n + m)`` elements if this number
            is less than half of ``n * m``. None means ``DEFAULT_RANK``.
        warmup_steps: number of steps that send uncompressed gradients; at least 3. None means
            ``DEFAULT_WARMUP_STEPS``.
    """

    def __init__(self, rank: int | None, warmup_steps: int | None) -> None:
        self._rank = DEFAULT_RANK if rank is None else rank
        warmup_steps = DEFAULT_WARMUP_STEPS if warmup_steps is None else warmup_steps
        self._warmup_steps = max(warmup_steps, _FIRST_STEPS_WHOLE)
        self._is_told = False

    def register(self, ddp: DistributedDataParallel) -> None:
        """Register the compression hook with ``ddp``, which is constructed after the first step of the run."""
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=self._warmup_steps - 1,
            orthogonalization_epsilon=_LEAST_NORM,
        )
        ddp.register_comm_hook(state, self._send)
        notice(
            f"powersgd: sends uncompressed gradients for the first {self._warmup_steps} steps of this run, then "
            f"factors of rank {self._rank}. Approximation errors are not saved, so a resumed run repeats the warm-up"
        )

    def _send(self, state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        sent = powerSGD_hook(state, bucket)
        if bucket.buffer().is_cpu:
            sent.wait()
        if not self._is_told and bucket.is_last() and state.total_numel_before_compression:
            self._is_told = True
            before, after = state.total_numel_before_compression, state.total_numel_after_compression
            notice(
                f"powersgd: each later step sends {after} numbers instead of {before}, {before / after:.1f} times fewer"
            )
        return sent
