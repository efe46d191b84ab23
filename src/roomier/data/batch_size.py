"""The micro-batch size of a loader, where it can be read and changed."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from roomier.data.rebuild import can_be_rebuilt, plain_sampler, rebuilt


def batch_size_of(loader: Any) -> int | None:
    """Samples of a micro-batch; None where anything but torch groups them, or draws them."""
    if not isinstance(loader, DataLoader) or not can_be_rebuilt(loader) or plain_sampler(loader) is None:
        return None
    batching = loader.batch_sampler
    return batching.batch_size if isinstance(batching, BatchSampler) else 1


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """A copy of ``loader``, whose :func:`batch_size_of` is known, that groups ``batch_size`` samples."""
    batching = loader.batch_sampler
    drop_last = isinstance(batching, BatchSampler) and batching.drop_last
    batches = BatchSampler(loader.sampler, batch_size, drop_last)
    return rebuilt(loader, batch_sampler=batches, batch_size=batch_size, drop_last=drop_last)
