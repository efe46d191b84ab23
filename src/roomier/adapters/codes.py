"""Weights in 8 or 4 bits: a code for each number, a scale for each block of 64.

``"int8"``: 255 even steps between minus and plus the largest magnitude of the block. ``"nf4"``: the 16 levels of
NormalFloat (Dettmers et al. 2023, "QLoRA", section 3 and appendix E), which numbers of a normal distribution use about
equally often; two codes share a byte. Scales are float32: 1.0625 and 0.5625 bytes for each number.
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
    """The codes of ``values`` in row-major order, and their scales, both flat.

    Returns:
        Codes: int8, one a number, or uint8, one for two numbers (the first in the high bits); the last block is filled
        up. Scales: the bits of float32 numbers as int32, which no conversion of a module to another dtype touches.
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
    """What :func:`encode` made codes of, as a tensor of ``shape``, rounded to ``dtype`` once."""
    factors = scales.view(torch.float32)[:, None]
    if code_format == "int8":
        values = codes.view(-1, BLOCK_SIZE).float().mul_(factors / _LARGEST_INT8)
    else:
        values = F.embedding(codes.int(), _nf4_pairs(codes.device)).view(-1, BLOCK_SIZE).mul_(factors)
    return values.view(-1)[: math.prod(shape)].view(shape).to(dtype)


def nf4_levels() -> list[float]:
    """The 16 levels, rising from -1 to 1.

    Quantiles of the normal distribution: 8 above zero and 7 below, each at even distances of probability between 1/2
    and the same outermost one, and zero itself; divided by the largest.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    above = torch.linspace(0.5, outermost, 9, dtype=torch.float64)[1:]
    below = torch.linspace(0.5, outermost, 8, dtype=torch.float64)[1:]
    quantiles = torch.cat([-torch.special.ndtri(below).flip(0), torch.zeros(1), torch.special.ndtri(above)])
    return [float(each) for each in quantiles / quantiles[-1]]


NF4_LEVELS = nf4_levels()
_kept: dict[torch.device, Tensor] = {}


def _nf4_pairs(device: torch.device) -> Tensor:
    """The two levels that a byte stands for, [256, 2]. Kept, and not by ``functools.cache``, past which a compiler
    looks."""
    if device in _kept:
        return _kept[device]
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    if type(pairs) is Tensor and not pairs.is_inference():  # else it serves this once: it is fake, or not for training
        _kept[device] = pairs
    return pairs
