"""The two moments of Adam in 8 or 4 bits each, block by block.

[Note: what the codes stand for]
Of each element is kept the root ``r`` of its second moment, and its first moment ``m`` as a *ratio*
``q = m / (r + e)``, where ``e`` is Adam's eps at that step: what the weight moves by, up to the learning rate. In a
block with the largest root ``R`` and the largest ratio ``Q``, a code of ``b`` bits stands for::

    r = R * ((k + 1) / 2^b)^2        k = 0 ... 2^b - 1: the root of the root is rounded, so small ones keep digits
    q = Q * d / (2^(b-1) - 1)        d = -(2^(b-1) - 1) ... 2^(b-1) - 1

Both largest values are kept exactly, in float32. That ``m`` is kept as a ratio bounds what rounding can do: errors of
``q`` are a share of the block's largest move, and an error of ``r`` changes both parts of ``m / r`` alike. Kept by
itself, ``m`` rounded up beside an ``r`` rounded down would make moves of many times the learning rate. A root is never
rounded to zero in a block that has another, so neither does an element that was silent jump when it speaks again.

Rounding is arithmetic, a root and a product and no search in a table, so it runs at the speed of the rest of a step.

[Note: dither]
A second moment changes by 1 part in 1000 a step (``beta2 = 0.999``), a code by 1 in 100 or in 4: rounded to nearest,
codes would stand still. So a number is rounded up as often as it is close to the one above: ``floor(x + u)``, where
``u`` runs through (0, 1) evenly from step to step: multiples of the golden ratio, shifted from column to column (a
Kronecker sequence; see e.g. Niederreiter, "Random Number Generation and Quasi-Monte Carlo Methods", 1992, chapter 3).
Step and column decide it, so what a resumed run rounds, or another number of ranks, is the same to the bit; whole
numbers of codes, such as zero and a block's largest, stay what they are.

[Note: blocks]
A block is part of one row (dimension 0), about 256 elements (8 bits) or 128 (4 bits). Ranks share a parameter by rows,
so a block never lies on two of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ELEMENTS = 4096  # smaller tensors gain nothing
MIN_BLOCK = 80  # elements: 8 bytes of scales in 80 are 0.1 a parameter
_BLOCK = {8: 256, 4: 128}  # by bits: about this many elements
_LEAST_SCALE = 1e-30  # a root below 3e-23 is zero in float32, its square is not kept
_STEP_SHIFT, _COLUMN_SHIFT = 0.6180339887498949, 0.7548776662466927  # 1 / golden ratio; 1 / plastic number
_MARGIN = 1 / 64  # keeps the largest value of a block from rounding past its last code


def can_be_coded(shape: Sequence[int]) -> bool:
    """Whether a parameter of this (whole) shape has enough elements, and rows long enough, for blocks."""
    return len(shape) > 1 and math.prod(shape) >= MIN_ELEMENTS and math.prod(shape[1:]) >= MIN_BLOCK


def block_size(num_columns: int, bits: int) -> int:
    """Elements of a block in a row of ``num_columns``; the last one has what is left."""
    return math.ceil(num_columns / max(1, round(num_columns / _BLOCK[bits])))


def num_blocks(shape: Sequence[int], bits: int) -> int:
    """Blocks of a row."""
    num_columns = math.prod(shape[1:])
    return math.ceil(num_columns / block_size(num_columns, bits))


def state_bytes(shape: Sequence[int], bits: int) -> int:
    """Bytes of codes and scales for a parameter of this shape, or a part of its rows: about 2.03 (8 bits) or 1.06
    (4 bits) an element."""
    return math.prod(shape) * bits // 4 + shape[0] * num_blocks(shape, bits) * 2 * 4


def empty_codes(parameter: Tensor, bits: int) -> dict[str, Tensor]:
    """Codes and scales of moments that are zero, by name, for the rows of ``parameter`` (a plain tensor).

    ``root_codes`` (uint8) and ``ratio_codes`` (int8), or with 4 bits ``codes`` (int8, the ratio in the upper half of
    each byte), have the parameter's shape; ``root_scales`` and ``ratio_scales`` (float32) have ``[rows, blocks]``.
    """
    shape, device = tuple(parameter.shape), parameter.device
    dtypes = {"root_codes": torch.uint8, "ratio_codes": torch.int8} if bits == 8 else {"codes": torch.int8}
    codes = {name: torch.zeros(shape, dtype=dtype, device=device) for name, dtype in dtypes.items()}
    scales = (shape[0], num_blocks(shape, bits))
    return codes | {name: torch.zeros(scales, device=device) for name in ("root_scales", "ratio_scales")}


def dither(num_columns: int, step: int, device: torch.device) -> Tensor:
    """``u - 1`` of [Note: dither], float32 ``[num_columns]``."""
    there = device if device.type in ("cpu", "cuda") else torch.device("cpu")  # mps has no float64
    column = torch.arange(num_columns, dtype=torch.float64, device=there)
    shifts = column.mul_(_COLUMN_SHIFT).add_(step * _STEP_SHIFT % 1).frac_()
    return shifts.mul_(1 - 2 * _MARGIN).add_(_MARGIN - 1).float().to(device)


@dataclass(frozen=True)
class Region:
    """Blocks of one size, in all rows: which columns and which scales are theirs."""

    columns: slice
    scales: slice
    size: int

    def cut(self, rows: Tensor) -> Tensor:
        """Its part of ``[rows, columns]`` as ``[rows, blocks, size]``."""
        part = rows[:, self.columns]
        return part.view(part.shape[0], part.shape[1] // self.size, self.size)


def regions(num_columns: int, bits: int) -> list[Region]:
    """The blocks of a row: equal ones, and where that does not come out even a last one that is shorter."""
    size = block_size(num_columns, bits)
    num_equal, left = divmod(num_columns, size)
    found = [Region(slice(0, num_equal * size), slice(0, num_equal), size)]
    if left:
        found.append(Region(slice(num_equal * size, num_columns), slice(num_equal, num_equal + 1), left))
    return found


def decode(codes: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """``r`` and ``q``, float32 ``[rows, blocks, size]``.

    Args:
        codes: ``[rows, blocks, size]``: of roots and of ratios; one tensor with 4 bits.
        scales: ``[rows, blocks, 1]``: of roots and of ratios. Multiplied by a number, so is what comes out.
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
    """Keep ``root`` and ``ratio`` in ``codes`` and ``scales``.

    Args:
        dither: of :func:`dither`, ``[blocks, size]``.
    """
    bits = _bits(codes)
    largest_root, largest_ratio = root.amax(2, keepdim=True), ratio.abs().amax(2, keepdim=True)
    # Between -1, of a small root, and the last code; what is behind the point is cut off, so the first code is 0.
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
