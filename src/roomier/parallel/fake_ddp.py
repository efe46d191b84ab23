"""DDP as a dry run sees it: torch's reducer is C++ that reads the memory of tensors, and fake ones have none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FakeDDP(nn.Module):
    """Holds and frees what ``DistributedDataParallel`` does, with ``gradient_as_bucket_view``; sends nothing.

    Buckets are there from the start and stay. In a backward that reduces, each gradient is copied into its bucket when
    it is complete, and becomes a view of it; in one that does not, gradients are added up outside of the buckets.

    Args:
        module: what it wraps; further arguments are those of DDP, and change nothing of this.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self._buckets = {each: torch.empty_like(each) for each in module.parameters() if each.requires_grad}
        for parameter in self._buckets:
            parameter.register_post_accumulate_grad_hook(self._into_bucket)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def register_comm_hook(self, state: object, hook: object) -> None:
        """What it sends instead of the buckets is not counted."""

    @torch.no_grad()
    def _into_bucket(self, parameter: Tensor) -> None:
        if self.require_backward_grad_sync and parameter.grad is not None:
            bucket = self._buckets[parameter]  # type: ignore[index]  # torch types hooks for any tensor
            bucket.copy_(parameter.grad)
            parameter.grad = bucket
