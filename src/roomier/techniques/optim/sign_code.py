"""Encoding of tensors as signs, with one bit per element and one scale per block. The codes are stored in rows of bytes
that ranks exchange.

[Note: which scale]
A block of :data:`BLOCK` elements has one scale, the mean of its absolute values. For given signs, this scale minimizes
the squared error. The norm of the error never exceeds the norm of the block, so error feedback stays bounded
(Karimireddy et al. 2019, arXiv 1901.09847, lemma 8). Using the root mean square as the scale would preserve the norm,
but the squared error could be up to twice the squared norm of the block. Blocks never span two tensors, because the
values of norms, embeddings and large matrices differ in magnitude, so a shared scale would cause large errors.

[Note: shards]
A tensor of ``n`` elements is sharded across ``N`` ranks like ``Shard(0)`` of a DTensor, into shards of ``ceil(n / N)``
elements. The last shards can be shorter or empty. Row ``r`` contains shard ``r`` of every tensor. The bits of all
tensors come first, followed by the scales of all tensors. In the code, a shard is padded to full blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 128
_BITS_BYTES = BLOCK // 8
_SCALE_BYTES = 4
_PACK = 0x0102040810204080  # multiplying eight bytes of 0 or 1 by this number collects the bits in the highest byte


class Pieces:
    """Division of a tensor with ``numel`` elements into ``num_ranks`` shards of at most ``size`` elements."""

    def __init__(self, numel: int, num_ranks: int) -> None:
        self.numel, self.num_ranks = numel, num_ranks
        self.size = -(-numel // num_ranks)

    def slice_of(self, rank: int) -> slice:
        """Return the slice of the flat tensor that belongs to ``rank``."""
        return slice(min(rank * self.size, self.numel), min((rank + 1) * self.size, self.numel))

    def to_rows(self, flat: Tensor, rows: Tensor) -> None:
        """Copy ``flat`` (``[numel]``) to ``rows`` (``[num_ranks, size or more]``). Elements of ``rows`` after the end
        of a shard do not change."""
        for inside, part in self._parts(rows):
            part.copy_(flat[inside].view_as(part))

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return the concatenated shards in ``rows`` as ``[numel]``."""
        if self.numel == rows.numel():
            return rows.reshape(-1)
        flat = rows.new_empty(self.numel)
        for inside, part in self._parts(rows):
            flat[inside].view_as(part).copy_(part)
        return flat

    def _parts(self, rows: Tensor) -> list[tuple[slice, Tensor]]:
        """Return the full shards and the partial shard, each as a slice of the tensor and the matching region of
        ``rows``."""
        num_full, rest = divmod(self.numel, self.size) if self.numel else (0, 0)
        full = slice(0, num_full * self.size), rows[:num_full, : self.size]
        return [full, (slice(num_full * self.size, self.numel), rows[num_full, :rest])] if rest else [full]


class SignCode:
    """Codes of several tensors in rows of bytes, one row per rank.

    Args:
        numels: number of elements in each tensor.
        num_ranks: number of rows.
        device: device of the codes.

    Attributes:
        pieces: division of each tensor into shards.
        row_bytes: number of bytes per row.
    """

    def __init__(self, numels: Sequence[int], num_ranks: int, device: torch.device) -> None:
        self.num_ranks = num_ranks
        self.pieces = [Pieces(numel, num_ranks) for numel in numels]
        self._num_blocks = [-(-piece.size // BLOCK) for piece in self.pieces]
        self._first_block = [sum(self._num_blocks[:index]) for index in range(len(numels))]
        total = sum(self._num_blocks)
        self._scales_at = total * _BITS_BYTES
        self.row_bytes = total * (_BITS_BYTES + _SCALE_BYTES)
        self._device = device
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        self._signs = 1.0 - 2.0 * bits  # [256, 8]: the signs that each byte represents
        self._counts = [self._elements_by_block(index) for index in range(len(numels))]

    def empty(self) -> Tensor:
        """Return rows for codes (uint8 ``[num_ranks, row_bytes]``) that represent zeros: all scales are 0."""
        return torch.zeros(self.num_ranks, self.row_bytes, dtype=torch.uint8, device=self._device)

    def encode(self, index: int, flat: Tensor, rows: Tensor) -> Tensor:
        """Write the code of tensor ``index`` to ``rows``, and return the values (``[numel]``) that the code
        represents."""
        pieces, width = self.pieces[index], self._num_blocks[index] * BLOCK
        if pieces.numel == self.num_ranks * width:
            padded = flat.view(self.num_ranks, width)
        else:
            padded = flat.new_zeros(self.num_ranks, width)
            pieces.to_rows(flat, padded)
        return pieces.from_rows(self._encode(index, padded, rows, self._counts[index]))

    def encode_piece(self, index: int, piece: Tensor, row: Tensor, rank: int, *, takes_largest: bool = False) -> Tensor:
        """Write the code of ``piece``, the flat shard of ``rank``, to ``row``. Return a flat tensor with the values
        that the code represents.

        Args:
            takes_largest: if True, use the largest absolute value as scale, so decoded values are encoded again without
                error.
        """
        width = self._num_blocks[index] * BLOCK
        padded = F.pad(piece, (0, width - piece.numel()))[None]
        counts = self._counts[index]
        own = counts if isinstance(counts, int) else counts[rank : rank + 1]
        return self._encode(index, padded, row[None], None if takes_largest else own)[0, : piece.numel()]

    def decode(self, index: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return tensor ``index`` (``[numel]``) from ``rows``."""
        return self.pieces[index].from_rows(self._decode(index, rows, dtype))

    def decode_sources(self, index: int, rows: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
        """Return the shard of ``rank`` from each source, as a tensor ``[len(rows), numel of the shard]`` with one row
        per source."""
        inside = self.pieces[index].slice_of(rank)
        return self._decode(index, rows, dtype)[:, : inside.stop - inside.start]

    def _encode(self, index: int, padded: Tensor, rows: Tensor, counts: int | Tensor | None) -> Tensor:
        blocks = padded.view(len(padded), -1, BLOCK)
        bits, scales = self._fields(index, rows)
        sizes = blocks.abs()
        scales.copy_(sizes.amax(-1) if counts is None else sizes.sum(-1) / counts)
        eights = torch.signbit(blocks).view(len(padded), -1).view(torch.int64)
        bits.copy_(eights.mul_(_PACK).bitwise_right_shift_(56))  # the cast preserves the lowest byte
        return torch.copysign(scales.to(blocks.dtype)[..., None], blocks).view_as(padded)

    def _decode(self, index: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
        bits, scales = self._fields(index, rows)
        signs = F.embedding(bits.int(), self._signs.to(dtype))
        blocks = signs.view(len(rows), -1, BLOCK)
        return blocks.mul_(scales.to(dtype)[..., None]).view(len(rows), -1)

    def _fields(self, index: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        first, num_blocks = self._first_block[index], self._num_blocks[index]
        bits = rows[:, first * _BITS_BYTES : (first + num_blocks) * _BITS_BYTES]
        begin = self._scales_at + first * _SCALE_BYTES
        return bits, rows[:, begin : begin + num_blocks * _SCALE_BYTES].view(torch.float32)

    def _elements_by_block(self, index: int) -> int | Tensor:
        """Return the number of elements in each block, excluding padding, but at least 1. The result is a tensor
        ``[num_ranks, blocks]``, or one number if all blocks are full."""
        pieces, num_blocks = self.pieces[index], self._num_blocks[index]
        if pieces.numel == self.num_ranks * num_blocks * BLOCK:
            return BLOCK
        sizes = [part.stop - part.start for part in map(pieces.slice_of, range(self.num_ranks))]
        starts = torch.arange(num_blocks) * BLOCK
        counts = (torch.tensor(sizes)[:, None] - starts).clamp(1, BLOCK)
        return counts.to(self._device, torch.float32)
