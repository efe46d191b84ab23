"""Replacement for DDP in dry runs. DDP's reducer is C++ code that reads memory, but fake tensors have no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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
