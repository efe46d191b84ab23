"""Classes of BatchNorm, which computes statistics of each micro-batch and updates running statistics."""

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
