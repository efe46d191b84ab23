"""Data loading: resumable sample order, batches of similar length, positions for all kinds of loaders, combined
loaders, shuffled and mixed streams, and token files."""

from roomier.data.by_length import LengthGroupedBatchSampler
from roomier.data.combined import CombinedLoader
from roomier.data.packing import PackedCollate
from roomier.data.sampler import OrderedSampler
from roomier.data.streams import Mixture, ShuffleBuffer
from roomier.data.tokens import TokenDataset, write_tokens

__all__ = [
    "CombinedLoader",
    "LengthGroupedBatchSampler",
    "Mixture",
    "OrderedSampler",
    "PackedCollate",
    "ShuffleBuffer",
    "TokenDataset",
    "write_tokens",
]
