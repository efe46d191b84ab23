"""Images as arrays of pixels, and PNG files of them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roomier.core.errors import RoomierError
from roomier.core.log import notice

Pixels = Any  # np.ndarray of shape (height, width, 3 or 4), uint8
_CHANNELS = (1, 3, 4)
_ACTION = "Pass a tensor (C, H, W), an array (H, W, C), an image (H, W), or a PIL image"
_reported: set[str] = set()  # names whose values were clipped in this process


def pixels_of(images: Any, name: str) -> list[Pixels]:
    """Return the pixels of ``images`` as uint8 arrays of shape (height, width, 3), or (height, width, 4) with an alpha
    channel.

    Args:
        images: a tensor, array or PIL image; several of them in a list; or a batch (N, C, H, W) or (N, H, W, C).
        name: name of the images for messages.

    Raises:
        RoomierError: an item is not an image.
    """
    if not isinstance(images, (list, tuple)):
        images = list(images) if getattr(images, "ndim", 0) == 4 else [images]
    return [_pixels_of_one(image, name) for image in images]


def captions_of(caption: str | Sequence[str] | None, num_images: int) -> list[str]:
    """Return the caption of each image; an empty list if there are no captions.

    Raises:
        RoomierError: the numbers of captions and images differ.
    """
    captions = [caption] if isinstance(caption, str) else [str(each) for each in caption or ()]
    if captions and len(captions) != num_images:
        action = "Pass one caption for each image"
        raise RoomierError("log_image: caption", captions, f"has another length than the {num_images} images", action)
    return captions


def _pixels_of_one(image: Any, name: str) -> Pixels:
    if hasattr(image, "getbands"):  # a PIL image
        return np.asarray(image.convert("RGBA" if "A" in image.getbands() else "RGB"))
    if not isinstance(image, (Tensor, np.ndarray)):
        raise RoomierError("log_image", (name, type(image).__name__), "is not an image", _ACTION)
    tensor = torch.as_tensor(image).detach()
    if tensor.dim() == 2:
        tensor = tensor.unsqueeze(-1)
    elif tensor.dim() == 3 and _has_channels_first(tensor, is_torch=isinstance(image, Tensor)):
        tensor = tensor.permute(1, 2, 0)
    if tensor.dim() != 3 or tensor.shape[-1] not in _CHANNELS or not tensor.numel():
        problem = "is not the shape of an image with 1, 3 or 4 channels"
        raise RoomierError("log_image", (name, tuple(image.shape)), problem, _ACTION)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        tensor = tensor.float()
        least, largest = torch.stack(tensor.aminmax()).tolist()
        if (least < -0.001 or largest > 1.001) and name not in _reported:
            _reported.add(name)
            notice(
                f"log_image({name!r}): values between {least:.4g} and {largest:.4g} are clipped to [0, 1]. Undo the "
                "normalization of the images before the call"
            )
        tensor = tensor.nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    if tensor.dtype != torch.uint8:
        action = "Pass values in [0, 1] as floating-point numbers, or values in [0, 255] as uint8"
        raise RoomierError("log_image", (name, tensor.dtype), "is not the dtype of an image", action)
    return tensor.expand(-1, -1, max(3, tensor.shape[-1])).cpu().contiguous().numpy()


def _has_channels_first(tensor: Tensor, *, is_torch: bool) -> bool:
    is_first, is_last = tensor.shape[0] in _CHANNELS, tensor.shape[-1] in _CHANNELS
    return is_first and (is_torch or not is_last)


def figure_of(figure: Any) -> Any:
    """Return ``figure`` if it is a matplotlib figure.

    Raises:
        RoomierError: it is another object.
    """
    if not (hasattr(figure, "savefig") and hasattr(figure, "set_canvas")):
        action = "Pass a matplotlib Figure, such as plt.gcf() or ax.figure"
        raise RoomierError("log_figure", type(figure).__name__, "is not a figure", action)
    return figure


def pixels_of_figure(figure: Any) -> Pixels:
    """Return the pixels of a matplotlib figure. The figure stays open."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late import: the figure has loaded matplotlib

    canvas = figure.canvas
    try:
        drawn: Any = FigureCanvasAgg(figure)
        drawn.draw()
        return np.array(drawn.buffer_rgba())
    finally:
        figure.set_canvas(canvas)


def png_of(pixels: Pixels) -> bytes:
    """Return a PNG file (ISO/IEC 15948) of ``pixels``."""
    height, width, num_channels = pixels.shape
    color = {3: 2, 4: 6}[num_channels]
    filters = np.zeros((height, 1), np.uint8)  # each row starts with the number of its filter
    rows = np.concatenate([filters, pixels.reshape(height, -1)], axis=1)
    chunks = (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, color, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows.tobytes())),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
