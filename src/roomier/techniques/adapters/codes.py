"""Weights quantized to 8 or 4 bits, with one code per number and one scale per block of 64 numbers.

- ``"int8"``: 255 evenly spaced levels between minus and plus the largest magnitude of the block.
- ``"nf4"``: the 16 levels of NormalFloat (Dettmers et al. 2023, "QLoRA", section 3 and appendix E). Normally
  distributed numbers are rounded to each level about equally often. Two codes are stored in one byte.

Scales are float32, so a number occupies 1.0625 bytes in int8, or 0.5625 bytes in nf4.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_SIZE = 64
FORMATS = ("int8", "nf4")
_LARGEST_INT8 = 127


def encode(values: Tensor, code_format: str) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of ``values`` in row-major order, both as 1-D tensors.

    Args:
        values: tensor of any shape.
        code_format: ``"int8"`` or ``"nf4"``.

    Returns:
        The codes are int8 with one code per number, or uint8 with two codes per byte (the first code in the high bits).
        The last block is padded. The scales are float32 bit patterns stored as int32, so that converting the dtype of a
        module does not change the scales.
    """
    flat = values.detach().reshape(-1).float()
    blocks = F.pad(flat, (0, -len(flat) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(1)
    scaled = blocks / scales.where(scales > 0, 1.0)[:, None]
    if code_format == "int8":
        codes = (scaled * _LARGEST_INT8).round().to(torch.int8).view(-1)
    else:
        levels = torch.tensor(NF4_LEVELS, device=values.device)
        nearest = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
        codes = nearest[:, 0] * 16 + nearest[:, 1]
    return codes, scales.view(torch.int32)


def decode(codes: Tensor, scales: Tensor, code_format: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the values that ``codes`` and ``scales`` represent. The values are computed in float32 and then cast to
    ``dtype``."""
    factors = scales.view(torch.float32)[:, None]
    if code_format == "int8":
        values = codes.view(-1, BLOCK_SIZE).float().mul_(factors / _LARGEST_INT8)
    else:
        values = F.embedding(codes.int(), _nf4_pairs(codes.device)).view(-1, BLOCK_SIZE).mul_(factors)
    return values.view(-1)[: math.prod(shape)].view(shape).to(dtype)


def nf4_levels() -> list[float]:
    """Return the 16 levels of NF4 in ascending order from -1 to 1.

    The levels are zero, 8 quantiles of the normal distribution above zero, and 7 quantiles below zero, all divided by
    the largest quantile. On each side, the probabilities of the quantiles are evenly spaced between 1/2 and an
    outermost probability, which is the same for both sides.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    above = torch.linspace(0.5, outermost, 9, dtype=torch.float64)[1:]
    below = torch.linspace(0.5, outermost, 8, dtype=torch.float64)[1:]
    quantiles = torch.cat([-torch.special.ndtri(below).flip(0), torch.zeros(1), torch.special.ndtri(above)])
    return [float(each) for each in quantiles / quantiles[-1]]


NF4_LEVELS = nf4_levels()
_kept: dict[torch.device, Tensor] = {}


def _nf4_pairs(device: torch.device) -> Tensor:
    """Return the two levels that each byte encodes, as a float32 tensor of shape ``(256, 2)``.

    The tensor is cached without ``functools.cache``, because compilers ignore that decorator.
    """
    if device in _kept:
        return _kept[device]
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    if type(pairs) is Tensor and not pairs.is_inference():  # do not cache fake tensors and inference tensors
        _kept[device] = pairs
    return pairs
