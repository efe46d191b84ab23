"""bfloat16 weights under an optimizer that computes in float32: how a weight is read, and how it is written back.

A bfloat16 number is the upper half of a float32 number. An update below 2^-9 of a weight is lost when the sum is
rounded to the nearest of them. Two ways lose nothing, at once or on average:

[Note: split]
The 16 bits that a weight has no room for stand beside it, as a signed number of the same shape. The weight is rounded
to nearest, and ties go *away* from zero: the weight's bits are then ``(bits + 0x8000) >> 16``, what is left over lies
in ``[-0x8000, 0x7fff]``, and weight and rest together give back every float32 number to the bit. With ties to even, as
a cast rounds, a rest of half a step would stand for two numbers. Not-a-number comes back as one of its many codes, and
a number that rounds beyond bfloat16's largest is infinite in the weight alone.

[Note: stochastic]
16 random bits are added to those of the float32 number before the lower half is cut off: a weight is rounded up as
often as it is close to the number above, so the mean of many roundings is the number itself. The random bits are a hash
of the element's place in the *whole* tensor and of a key (:func:`noise_key`) made of a seed, the step and the
parameter's index: there is no generator to save, a run that is resumed draws what it would have drawn, and so does each
rank, whatever part of the parameter it has. Copies of a parameter stay alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from roomier.core import torch_fake, torch_private

CHUNK = 2**16  # elements: what is computed in float32 beside a weight stays in the processor's cache
_CHUNK_ON_DEVICE = 2**24  # enough work for a kernel
_HALF = 0x8000
_MASK = 0xFFFFFFFF


def chunks(num_elements: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices of a flat tensor, ``size`` elements each."""
    for start in range(0, num_elements, size):
        yield slice(start, min(start + size, num_elements))


def flat_parts(weight: Tensor, *others: Tensor | None) -> Iterator[tuple[int, list[Any]]]:
    """``weight`` and the tensors that belong to its elements, in flat parts of a size that computes fast: the place of
    the first element, and the parts. Tensors that lie in memory in other orders come whole."""
    tensors = [weight, *others]
    if not all(each is None or each.is_contiguous() for each in tensors):
        yield 0, tensors
        return
    flat = [None if each is None else each.view(-1) for each in tensors]
    for part in torch_fake.few_of(list(chunks(weight.numel(), CHUNK if weight.is_cpu else _CHUNK_ON_DEVICE))):
        yield part.start, [None if each is None else each[part] for each in flat]


def empty_low_bits(weight: Tensor) -> Tensor:
    """The low bits of ``weight`` as it is now (int16, cut as it is): none is set, it stands for itself."""
    return torch.zeros_like(weight, dtype=torch.int16, requires_grad=False)


def read(weight: Tensor, low_bits: Tensor | None = None) -> Tensor:
    """The float32 number of each element of a plain tensor (any shape).

    Args:
        weight: of bfloat16; any other is returned itself, and :func:`write` then has nothing to do.
        low_bits: of :func:`empty_low_bits`, as :func:`write` left them.
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
    """Put ``value`` (float32) into ``weight``, with ``low_bits`` where they are given, else at random with a ``key``,
    else to the nearest.

    Args:
        weight: a plain tensor; one that is not of bfloat16 takes ``value`` as it is.
        low_bits: int16, of the shape of ``weight``.
        key: of :func:`noise_key`.
        first: place of the first element of ``weight`` in the whole parameter, flat; of use with ``key`` alone.
    """
    if weight.dtype is not torch.bfloat16:
        if not torch_private.is_same_memory(value, weight):
            weight.copy_(value)
        return
    if low_bits is None and key is None:
        weight.copy_(value)
        return
    # Of the codes of not-a-number, some would be carried over into the sign: all become the usual one.
    bits = value.nan_to_num(math.nan, math.inf, -math.inf).view(torch.int32)
    upper = bits + _HALF
    if low_bits is not None:
        low_bits.copy_(bits)  # the cast keeps the lower half
    elif key is not None:
        upper.add_(noise(key, first, weight.numel(), weight.device).view(weight.shape))
    weight.view(torch.int16).copy_(upper.bitwise_right_shift_(16))


def noise_key(seed: int, step: int, index: int) -> int:
    """A number of 32 bits for the random numbers of one parameter at one step."""
    key = 0
    for each in (seed, step, index):
        key = _mixed(key ^ (each * 0x9E3779B9 & _MASK))
    return key


def noise(key: int, first: int, num_elements: int, device: torch.device | None = None) -> Tensor:
    """``num_elements`` random int16, all of whose values are equally likely, for the elements from ``first`` on.

    Two elements share a word of 32 bits: the hash "lowbias32" (C. Wellons, "Prospecting for hash functions", 2018) of
    its place and the key.
    """
    begin, end = first // 2, (first + num_elements + 1) // 2
    words = torch.arange(begin, end, dtype=torch.int64 if end > 2**31 else torch.int32, device=device).to(torch.int32)
    words.bitwise_xor_(_signed(key))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words.bitwise_xor_(_shifted(words, shift)).mul_(_signed(factor))
    words.bitwise_xor_(_shifted(words, 16))
    return words.view(torch.int16)[first % 2 :][:num_elements]


def _shifted(words: Tensor, shift: int) -> Tensor:
    """``words >> shift`` with zeros coming in, which int32 does not do by itself."""
    return (words >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _mixed(word: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ word >> shift) * factor & _MASK
    return word ^ word >> 16


def _signed(word: int) -> int:
    """The int32 with the bits of ``word``."""
    return word - 2**32 if word >= 2**31 else word
