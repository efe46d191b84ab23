"""Communication hook for DDP that sends gradients in 16 bits."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch defines it conditionally


def send_rounded(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduce the gradients of ``bucket`` in ``dtype``, as a communication hook for DDP.

    torch provides ``bf16_compress_hook``, which DDP rejects on a CPU.
    """
    gradients: Tensor = bucket.buffer()
    rounded = gradients.to(dtype).div_(dist.get_world_size())

    def restore(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(reduced.value()[0])

    future: torch.futures.Future[Tensor] = dist.all_reduce(rounded, async_op=True).get_future().then(restore)
    return future
