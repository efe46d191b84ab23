"""Data loading: resumable sample order, a position for every kind of loader, several loaders together, token files."""

from roomier.data.combined import CombinedLoader
from roomier.data.sampler import OrderedSampler
from roomier.data.tokens import TokenDataset, write_tokens

__all__ = ["CombinedLoader", "OrderedSampler", "TokenDataset", "write_tokens"]
