"""Read and change the micro-batch size of a loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from roomier.data.rebuild import can_be_rebuilt, plain_sampler, rebuilt


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples per micro-batch, or None if this number cannot be changed.

    The number cannot be changed if code other than torch's samplers orders or groups the samples, for example if the
    items of the dataset are batches.
    """
    if not isinstance(loader, DataLoader) or not can_be_rebuilt(loader) or plain_sampler(loader) is None:
        return None
    batching = loader.batch_sampler
    return batching.batch_size if isinstance(batching, BatchSampler) else None


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """Return a copy of ``loader`` with ``batch_size`` samples per batch.

    Args:
        loader: DataLoader for which :func:`batch_size_of` is not None.
        batch_size: number of samples per micro-batch.
    """
    batching, sampler = loader.batch_sampler, plain_sampler(loader)
    assert isinstance(batching, BatchSampler)
    assert sampler is not None
    # If the user passed a batch sampler, loader.sampler is an unused default of torch.
    batches = BatchSampler(sampler, batch_size, batching.drop_last)
    changes = {"sampler": sampler, "batch_sampler": batches}
    return rebuilt(loader, **changes, batch_size=batch_size, drop_last=batching.drop_last)
