"""Data: a resumable order of samples, a source of batches for every kind of loader, token files."""

from roomier.data.sampler import OrderedSampler
from roomier.data.tokens import TokenDataset, write_tokens

__all__ = ["OrderedSampler", "TokenDataset", "write_tokens"]
