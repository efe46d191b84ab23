"""PowerSGD, which uses torch's hook for DDP to send the gradient of each matrix as two low-rank factors."""

import math

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch defines it conditionally
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from roomier.core.log import notice
from roomier.plan.parts import ParallelPlan

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
        parallel: plan that contains the rank of the factors and the number of steps that send uncompressed gradients.
    """

    def __init__(self, parallel: ParallelPlan) -> None:
        self._rank = parallel.compression_rank or DEFAULT_RANK
        self._warmup_steps = max(parallel.compression_warmup_steps or DEFAULT_WARMUP_STEPS, _FIRST_STEPS_WHOLE)
        self._is_told = False

    @staticmethod
    def sent_bytes(shape: torch.Size, itemsize: int, parallel: ParallelPlan) -> int:
        """Return the bytes that are sent for a gradient of ``shape``. The factors of a matrix have ``rank * (n + m)``
        elements. torch sends the factors if they have less than half of the elements of the matrix."""
        num_elements = math.prod(shape)
        if len(shape) > 1:
            rank = parallel.compression_rank or DEFAULT_RANK
            num_factors = min(rank, shape[0]) * (shape[0] + num_elements // max(shape[0], 1))
            num_elements = num_factors if 2 * num_factors < num_elements else num_elements
        return num_elements * itemsize

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
