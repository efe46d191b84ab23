"""Classes of BatchNorm modules, which compute the statistics of each micro-batch and update running statistics."""

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
