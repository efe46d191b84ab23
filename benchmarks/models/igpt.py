"""iGPT: a GPT that predicts the pixels of an image one after the other (Chen et al. 2020, "Generative Pretraining From
Pixels").

The suffix of a tensor's name is its shape:

    B  images in the batch         H and W  height and width of an image
    V  colors in the palette       T  pixels in an image, H * W
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.core.errors import RoomierError
from roomier.models.gpt import GPT, GPTConfig

# Mapping from each name to (num_layers, num_heads, width), from table 1 of the paper.
SIZES = {"igpt-s": (24, 8, 512), "igpt-m": (36, 8, 1024), "igpt-l": (48, 16, 1536)}


class ImageGPT(nn.Module):
    """GPT over the pixels of an image in raster order (section 2.1 of the paper), without labels.

    The input of each position is the previous pixel. The input of the first position is an additional start token.

    Args:
        config: sizes of the GPT. ``vocab_size`` is the number of colors, and ``context`` is the number of pixels.

    Example:
        >>> model = ImageGPT(GPTConfig(vocab_size=16, context=28 * 28, num_layers=8, num_heads=2, width=16))
        >>> logits, loss = model(pixels)
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.network = GPT(config)
        self.start = nn.Parameter(torch.empty(config.width))
        nn.init.normal_(self.start, std=0.02)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of each pixel, ``[B, T, V]``, and the mean cross-entropy in nats per pixel.

        Args:
            pixels: palette index of each pixel, int64 ``[B, H, W]``.

        Raises:
            RoomierError: the image has more pixels than the context.
        """
        pixels_BT = pixels.flatten(1)
        T = pixels_BT.shape[1]
        if self.config.context < T:
            problem = f"must have at most {self.config.context} pixels, the context of the model"
            raise RoomierError("pixels", tuple(pixels.shape), problem, "Use smaller images, or raise context")
        gpt = self.network
        start_B1D = self.start.expand(len(pixels_BT), 1, -1)
        x_BTD = torch.cat([start_B1D, gpt.tokens(pixels_BT[:, :-1])], dim=1)
        x_BTD = gpt.dropout(x_BTD + gpt.positions(torch.arange(T, device=pixels.device)))
        for block in gpt.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = gpt.head(gpt.norm(x_BTD))
        return logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), pixels_BT.flatten())
