"""ResNet with bottleneck blocks (He et al. 2015, arXiv 1512.03385, table 1), without or with a classifier.

The suffix of a tensor's name is its shape: B images, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from roomier.api.module import Module

EXPANSION = 4
"""Ratio of the output channels of a block to the channels of its 3 x 3 convolution."""


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 pixels with BatchNorm, and a residual connection.

    The 3 x 3 convolution applies the stride, as in torchvision's ResNet-50.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * channels
        self.reduce = _convolution(channels_in, channels, 1)
        self.spatial = _convolution(channels, channels, 3, stride)
        self.expand = _convolution(channels, channels_out, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(each) for each in (channels, channels, channels_out))
        has_shortcut = stride == 1 and channels_in == channels_out
        self.shortcut = (
            nn.Identity()
            if has_shortcut
            else nn.Sequential(_convolution(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out))
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the output of the block."""
        y_BCHW = F.relu(self.norms[0](self.reduce(x_BCHW)), inplace=True)
        y_BCHW = F.relu(self.norms[1](self.spatial(y_BCHW)), inplace=True)
        y_BCHW = self.norms[2](self.expand(y_BCHW))
        return F.relu(y_BCHW + self.shortcut(x_BCHW), inplace=True)


class ResNet(nn.Module):
    """Trunk of a ResNet. The result for an image is a vector with ``num_features`` elements.

    Args:
        depths: number of blocks in each of the four stages. The default describes ResNet-50.
        channels: number of channels of the first convolution. Each stage has twice the channels of the previous stage.

    Attributes:
        num_features: length of the result for an image.
    """

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), channels: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.ModuleList()
        channels_in = channels
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(Bottleneck(channels_in, channels * 2**stage, stride))
                channels_in = EXPANSION * channels * 2**stage
        self.num_features = channels_in
        for each in self.modules():
            if isinstance(each, nn.Conv2d):
                nn.init.kaiming_normal_(each.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the features of each image, ``[B, num_features]``."""
        x_BCHW = self.stem(x_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return x_BCHW.mean(dim=(2, 3))


def _convolution(channels_in: int, channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, size, stride, size // 2, bias=False)


class Classifier(Module):
    """ResNet with a linear layer that returns the scores of the classes. A batch contains images and classes.

    Args:
        depths, channels: sizes of the :class:`ResNet`.
        num_classes: number of classes.
    """

    def __init__(self, depths: Sequence[int], channels: int, num_classes: int) -> None:
        super().__init__()
        self.trunk = ResNet(depths, channels)
        self.head = nn.Linear(self.trunk.num_features, num_classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int = 0) -> Tensor:
        """Return the mean cross-entropy."""
        images_BCHW, labels_B = batch
        return F.cross_entropy(self.head(self.trunk(images_BCHW)), labels_B)
