"""Data: a resumable order of samples, a source of batches for every kind of loader, several together, token files."""

from roomier.data.combined import CombinedLoader
from roomier.data.sampler import OrderedSampler
from roomier.data.tokens import TokenDataset, write_tokens

__all__ = ["CombinedLoader", "OrderedSampler", "TokenDataset", "write_tokens"]
