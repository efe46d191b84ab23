"""Quantization of Adam's two moments to 8 or 4 bits each, block by block.

[Note: meaning of the codes]
For each element, roomier stores the root ``r`` of the second moment, and the first moment ``m`` as a *ratio* ``q = m /
(r + e)``, where ``e`` is Adam's eps in that step. The update of the weight is this ratio, scaled by the learning rate
and the bias corrections. In a block whose largest root is ``R`` and whose largest ratio is ``Q``, a code of ``b`` bits
represents::

    r = R * ((k + 1) / 2^b)^2        k = 0 ... 2^b - 1: the root of the root is rounded, so small roots keep precision
    q = Q * d / (2^(b-1) - 1)        d = -(2^(b-1) - 1) ... 2^(b-1) - 1

``R`` and ``Q`` are stored exactly in float32. Storing ``m`` as a ratio limits the effect of rounding: an error in ``q``
is a fraction of the largest step in the block, and an error in ``r`` changes both parts of ``m / r`` equally. If ``m``
and ``r`` had separate codes, rounding ``m`` up and ``r`` down would cause steps of many times the learning rate. In a
block with a nonzero root, no root is rounded to zero, so an element without recent gradients does not make a large step
at its next gradient.

Rounding requires a root and a product, but no table, so it is as fast as the other parts of a step.

[Note: dither]
A second moment changes by about 1/1000 per step (``beta2 = 0.999``), but adjacent codes differ by about 1/100 (8 bits)
or 1/4 (4 bits), so with rounding to nearest, codes would never change. A number ``x``, in units of codes, is therefore
rounded to ``floor(x + u)``, where ``u`` is evenly distributed in (0, 1) over the steps. The frequency of rounding up
then equals the distance of ``x`` from the code below. ``u`` consists of fractional parts of multiples of the golden
ratio, shifted from column to column (a Kronecker sequence; see Niederreiter, "Random Number Generation and Quasi-Monte
Carlo Methods", 1992, chapter 3). It depends only on step and column, so a resumed run and any number of ranks round
identically. Numbers that a code represents exactly, such as zero and the maximum of a block, do not change.

[Note: blocks]
A block is a part of one row (dimension 0) with about 256 elements (8 bits) or 128 elements (4 bits). Parameters are
sharded by rows, so a block never spans two ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roomier.core.device.capability import capabilities_of

MIN_ELEMENTS = 4096  # quantization of smaller tensors saves little memory
MIN_BLOCK = 80  # elements per row; for 80 elements, 8 bytes of scales are 0.1 bytes per element
_BLOCK = {8: 256, 4: 128}  # approximate number of elements per block, by bits
_LEAST_SCALE = 1e-30  # the square of a root below 3e-23 is zero in float32
_STEP_SHIFT, _COLUMN_SHIFT = 0.6180339887498949, 0.7548776662466927  # 1 / golden ratio; 1 / plastic number
_MARGIN = 1 / 64  # margin, so that the maximum of a block is not rounded beyond the last code


def can_be_coded(shape: Sequence[int]) -> bool:
    """Return True if a parameter with this unsharded shape has enough elements and long enough rows for blocks."""
    return len(shape) > 1 and math.prod(shape) >= MIN_ELEMENTS and math.prod(shape[1:]) >= MIN_BLOCK


def block_size(num_columns: int, bits: int) -> int:
    """Return the number of elements per block in a row of ``num_columns`` elements. The last block can be shorter."""
    return math.ceil(num_columns / max(1, round(num_columns / _BLOCK[bits])))


def num_blocks(shape: Sequence[int], bits: int) -> int:
    """Return the number of blocks per row."""
    num_columns = math.prod(shape[1:])
    return math.ceil(num_columns / block_size(num_columns, bits))


def state_bytes(shape: Sequence[int], bits: int) -> int:
    """Return the size in bytes of codes and scales for a parameter or shard of this shape: about 2.03 (8 bits) or 1.06
    (4 bits) per element."""
    return math.prod(shape) * bits // 4 + shape[0] * num_blocks(shape, bits) * 2 * 4


def empty_codes(parameter: Tensor, bits: int) -> dict[str, Tensor]:
    """Return the codes and scales of zero moments by name, for the rows of ``parameter`` (an ordinary tensor).

    Codes have the parameter's shape. The 8-bit codes are ``root_codes`` (uint8) and ``ratio_codes`` (int8). The 4-bit
    codes are ``codes`` (int8), with the ratio in the upper half of each byte. ``root_scales`` and ``ratio_scales``
    (float32) have the shape ``[rows, blocks]``.
    """
    shape, device = tuple(parameter.shape), parameter.device
    dtypes = {"root_codes": torch.uint8, "ratio_codes": torch.int8} if bits == 8 else {"codes": torch.int8}
    codes = {name: torch.zeros(shape, dtype=dtype, device=device) for name, dtype in dtypes.items()}
    scales = (shape[0], num_blocks(shape, bits))
    return codes | {name: torch.zeros(scales, device=device) for name in ("root_scales", "ratio_scales")}


def dither(num_columns: int, step: int, device: torch.device) -> Tensor:
    """Return ``u - 1`` as a float32 tensor ``[num_columns]``. [Note: dither] defines ``u``."""
    there = device if torch.float64 in capabilities_of(device).dtypes else torch.device("cpu")
    column = torch.arange(num_columns, dtype=torch.float64, device=there)
    shifts = column.mul_(_COLUMN_SHIFT).add_(step * _STEP_SHIFT % 1).frac_()
    return shifts.mul_(1 - 2 * _MARGIN).add_(_MARGIN - 1).float().to(device)


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks of equal size in all rows, given by the slices of their columns and of their scales."""

    columns: slice
    scales: slice
    size: int

    def cut(self, rows: Tensor) -> Tensor:
        """Return this region of ``[rows, columns]`` as ``[rows, blocks, size]``."""
        part = rows[:, self.columns]
        return part.view(part.shape[0], part.shape[1] // self.size, self.size)


def regions(num_columns: int, bits: int) -> list[EqualBlocks]:
    """Return the blocks of a row: blocks of equal size, and a shorter last block if necessary."""
    size = block_size(num_columns, bits)
    num_equal, left = divmod(num_columns, size)
    found = [EqualBlocks(slice(0, num_equal * size), slice(0, num_equal), size)]
    if left:
        found.append(EqualBlocks(slice(num_equal * size, num_columns), slice(num_equal, num_equal + 1), left))
    return found


def decode(codes: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ``r`` and ``q`` as float32 tensors ``[rows, blocks, size]``.

    Args:
        codes: tensors ``[rows, blocks, size]``, one for roots and one for ratios; with 4 bits, one tensor for both.
        scales: tensors ``[rows, blocks, 1]``, one for roots and one for ratios. The result is proportional to the
            scales.
    """
    bits = _bits(codes)
    number = codes[0].float()
    if bits == 8:
        ratio = codes[1].float()
    else:
        ratio = (number * (1 / 16)).floor()
        number = number - 16 * ratio
    number = number + 1
    return number * number * (scales[0] * 4**-bits), ratio * (scales[1] * (1 / _largest_ratio_code(bits)))


def encode(codes: Sequence[Tensor], scales: Sequence[Tensor], root: Tensor, ratio: Tensor, dither: Tensor) -> None:
    """Store ``root`` and ``ratio`` in ``codes`` and ``scales``.

    Args:
        codes, scales: as in :func:`decode`, written in place.
        root, ratio: float32 ``[rows, blocks, size]``.
        dither: result of :func:`dither`, ``[blocks, size]``.
    """
    bits = _bits(codes)
    largest_root, largest_ratio = root.amax(2, keepdim=True), ratio.abs().amax(2, keepdim=True)
    # The number is greater than -1 (for a small root) and less than 2**bits. The cast truncates toward zero.
    number = (root * (4**bits / largest_root.clamp_min(_LEAST_SCALE))).sqrt() + dither
    ratio = (ratio * (_largest_ratio_code(bits) / largest_ratio.clamp_min(_LEAST_SCALE)) - dither).floor()
    if bits == 8:
        codes[0].copy_(number.to(torch.int32))
        codes[1].copy_(ratio)
    else:
        codes[0].copy_((number.trunc() + 16 * ratio).to(torch.int32))
    scales[0].copy_(largest_root)
    scales[1].copy_(largest_ratio)


def _bits(codes: Sequence[Tensor]) -> int:
    return 8 if len(codes) == 2 else 4


def _largest_ratio_code(bits: int) -> int:
    return 127 if bits == 8 else 7
