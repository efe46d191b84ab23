"""The micro-batch size of a loader, where it can be read and changed."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from roomier.data.rebuild import can_be_rebuilt, plain_sampler, rebuilt


def batch_size_of(loader: Any) -> int | None:
    """Samples of a micro-batch; None where anything but torch groups them (a data set whose items are batches, say), or
    draws them."""
    if not isinstance(loader, DataLoader) or not can_be_rebuilt(loader) or plain_sampler(loader) is None:
        return None
    batching = loader.batch_sampler
    return batching.batch_size if isinstance(batching, BatchSampler) else None


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """A copy of ``loader``, whose :func:`batch_size_of` is known, that groups ``batch_size`` samples."""
    batching, sampler = loader.batch_sampler, plain_sampler(loader)
    assert isinstance(batching, BatchSampler)
    assert sampler is not None
    # Of a batch sampler that the user made it is not loader.sampler, which is torch's default then.
    batches = BatchSampler(sampler, batch_size, batching.drop_last)
    changes = {"sampler": sampler, "batch_sampler": batches}
    return rebuilt(loader, **changes, batch_size=batch_size, drop_last=batching.drop_last)
