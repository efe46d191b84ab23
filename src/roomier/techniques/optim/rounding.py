"""Storage of bfloat16 weights for an optimizer that computes in float32.

A bfloat16 number is the upper half of a float32 number. An update that is smaller than 2^-9 times the weight is lost if
the new weight is rounded to nearest. Two methods prevent this loss, the first exactly and the second on average:

[Note: split]
The 16 low bits of each weight are stored separately, as a signed integer tensor of the same shape. The weight is
rounded to nearest, with ties *away* from zero, so its bits are ``(bits + 0x8000) >> 16``, and the remainder is in
``[-0x8000, 0x7fff]``. Weight and remainder together restore every float32 number exactly. If ties were rounded to even,
as in a cast, a remainder of half a step would represent two numbers. Every NaN is restored as the default NaN, and a
number that rounds beyond the largest bfloat16 number is infinite in the weight but is restored exactly.

[Note: stochastic]
16 random bits are added to the float32 number before the lower half is truncated. The probability of rounding up is the
distance from the next lower bfloat16 number, as a fraction of the distance between adjacent bfloat16 numbers, so the
mean of many roundings equals the float32 number. The random bits are a hash of the element's position in the
*unsharded* tensor and of a key (:func:`noise_key`), which is computed from seed, step and parameter index. Checkpoints
therefore contain no generator state, a resumed run uses the same random bits, and each rank uses the same bits for its
shard as a single process. Replicas of a parameter stay identical.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from roomier.core import torch_fake, torch_private

CHUNK = 2**16  # number of elements per chunk, chosen so that float32 temporaries fit in the cache
_CHUNK_ON_DEVICE = 2**24  # enough work for one kernel
_HALF = 0x8000
_MASK = 0xFFFFFFFF


def flat_parts(weight: Tensor, *others: Tensor | None) -> Iterator[tuple[int, list[Any]]]:
    """Yield flat chunks of ``weight`` and ``others``, which have the same number of elements. Each chunk is yielded
    with the position of its first element. Tensors that are not contiguous are yielded in full."""
    tensors = [weight, *others]
    if not all(each is None or each.is_contiguous() for each in tensors):
        yield 0, tensors
        return
    flat = [None if each is None else each.view(-1) for each in tensors]
    size = CHUNK if torch_fake.kind_of(weight) == "cpu" else _CHUNK_ON_DEVICE
    for start in torch_fake.few_of(range(0, weight.numel(), size)):
        yield start, [None if each is None else each[start : start + size] for each in flat]


def rounded_parts(
    weight: Tensor, *others: Tensor, low_bits: Tensor | None = None, key: int | None = None, first: int = 0
) -> Iterator[list[Any]]:
    """Yield the float32 values of each chunk of ``weight`` with the chunks of ``others``, and write the values to
    ``weight`` when the next chunk is requested. For the arguments, see :func:`flat_parts` and :func:`write`."""
    for start, (part, own_bits, *rest) in flat_parts(weight, low_bits, *others):
        value = read(part, own_bits)
        yield [value, *rest]
        write(part, value, low_bits=own_bits, key=key, first=first + start)


def empty_low_bits(weight: Tensor) -> Tensor:
    """Return the initial low bits of ``weight``: an int16 tensor of zeros with the same sharding as the weight."""
    return torch.zeros_like(weight, dtype=torch.int16, requires_grad=False)


def read(weight: Tensor, low_bits: Tensor | None = None) -> Tensor:
    """Return the float32 value of each element of ``weight``, which is an ordinary tensor of any shape.

    Args:
        weight: bfloat16 tensor; a tensor of a different dtype is returned unchanged, so writing it back with
            :func:`write` has no effect.
        low_bits: result of :func:`empty_low_bits`, as updated by :func:`write`.
    """
    if weight.dtype is not torch.bfloat16:
        return weight
    value = weight.float()
    if low_bits is not None:
        value.view(torch.int32).add_(low_bits)
    return value


def write(
    weight: Tensor, value: Tensor, *, low_bits: Tensor | None = None, key: int | None = None, first: int = 0
) -> None:
    """Write ``value`` (float32) to ``weight``. The value is stored exactly with ``low_bits``, rounded stochastically
    with ``key``, and otherwise rounded to nearest.

    Args:
        weight: an ordinary tensor; if it is not bfloat16, ``value`` is copied.
        value: float32 numbers of the same shape.
        low_bits: int16 tensor with the shape of ``weight``.
        key: result of :func:`noise_key`.
        first: flat position of the first element of ``weight`` in the unsharded parameter; used only with ``key``.
    """
    if weight.dtype is not torch.bfloat16:
        if not torch_private.is_same_memory(value, weight):
            weight.copy_(value)
        return
    if low_bits is None and key is None:
        weight.copy_(value)
        return
    # Rounding some bit patterns of NaN would change the sign bit, so every NaN is replaced by the default NaN.
    bits = value.nan_to_num(math.nan, math.inf, -math.inf).view(torch.int32)
    upper = bits + _HALF
    if low_bits is not None:
        low_bits.copy_(bits)  # the cast preserves the lower half
    elif key is not None:
        upper.add_(noise(key, first, weight.numel(), weight.device).view(weight.shape))
    weight.view(torch.int16).copy_(upper.bitwise_right_shift_(16))


def noise_key(seed: int, step: int, index: int) -> int:
    """Return a 32-bit key for the random numbers of one parameter in one step."""
    key = 0
    for each in (seed, step, index):
        key = _mixed(key ^ (each * 0x9E3779B9 & _MASK))
    return key


def noise(key: int, first: int, num_elements: int, device: torch.device | None = None) -> Tensor:
    """Return ``num_elements`` uniformly distributed random int16 values for consecutive elements that start at
    ``first``.

    Two adjacent elements share a 32-bit word. The word is the hash "lowbias32" (C. Wellons, "Prospecting for hash
    functions", 2018) of the word's position and the key.
    """
    begin, end = first // 2, (first + num_elements + 1) // 2
    words = torch.arange(begin, end, dtype=torch.int64 if end > 2**31 else torch.int32, device=device).to(torch.int32)
    words.bitwise_xor_(_signed(key))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    words.bitwise_xor_(_shifted(words, 16))
    return words.view(torch.int16)[first % 2 :][:num_elements]


def _shifted(words: Tensor, shift: int) -> Tensor:
    """Shift ``words`` right without sign extension. In contrast, ``>>`` of torch extends the sign of int32 numbers."""
    return (words >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _mixed(word: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ word >> shift) * factor & _MASK
    return word ^ word >> 16


def _signed(word: int) -> int:
    """Return the int32 number that has the bits of ``word``."""
    return word - 2**32 if word >= 2**31 else word
