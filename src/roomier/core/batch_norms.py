"""What counts as BatchNorm: its statistics are of a whole micro-batch, and are kept while it trains."""

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
