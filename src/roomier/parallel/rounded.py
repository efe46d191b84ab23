"""Gradients that DDP sends in fewer bits."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # it is there, under a condition


def send_rounded(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A hook for DDP: gradients travel, and are added up, in ``dtype``.

    torch has one for bfloat16 (``bf16_compress_hook``), which DDP refuses on the CPU.
    """
    gradients: Tensor = bucket.buffer()
    rounded = gradients.to(dtype).div_(dist.get_world_size())

    def put_back(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        return gradients.copy_(reduced.value()[0])

    future: torch.futures.Future[Tensor] = dist.all_reduce(rounded, async_op=True).get_future().then(put_back)
    return future
