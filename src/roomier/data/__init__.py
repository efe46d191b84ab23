"""Data loading: resumable sample order, positions for all kinds of loaders, combined loaders and token files."""

from roomier.data.combined import CombinedLoader
from roomier.data.sampler import OrderedSampler
from roomier.data.tokens import TokenDataset, write_tokens

__all__ = ["CombinedLoader", "OrderedSampler", "TokenDataset", "write_tokens"]
