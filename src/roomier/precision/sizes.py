"""Sizes of matrix products that a device computes slowly.

[Note: sizes that a device likes]
Units for matrix products take blocks of fixed size; what does not fill a block is computed for nothing. From NVIDIA's
"Matrix Multiplication Background User's Guide" (section on tensor core requirements): rows of 16 bytes are what the
kernels read at a time, 8 numbers of 16 bits or 4 of TF32 (before cuBLAS 11 any other size did not use tensor cores at
all); on an A100 and later rows of 128 bytes are best, 64 or 32 numbers. Intel's AMX multiplies tiles of 16 rows of 64
bytes, 32 numbers of bfloat16 (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from roomier.core import torch_private
from roomier.precision.policy import Precision

_LEAST_WEIGHTS = 2**16  # smaller layers do not decide how long a step takes
_LEAST_SHARE = 0.01  # of the model's multiplications: done in layers of this size, or for nothing


@dataclass(frozen=True)
class Liked:
    """Multiples that a device likes in one dtype, in numbers.

    Args:
        name: of the dtype.
        aligned: what a size must be a multiple of to be read well.
        tile: what it must be a multiple of to fill whole blocks.
    """

    name: str
    aligned: int
    tile: int


@dataclass(frozen=True)
class _Size:
    """A side of a layer's matrix.

    Args:
        work: multiplications of a token in forward and backward.
    """

    layer: str
    side: str
    count: int
    work: int


def size_warnings(network: nn.Module, precision: Precision, device: torch.device) -> list[str]:
    """A line for each size of a linear layer that is no multiple of what ``device`` likes in that dtype, where it
    matters for the speed of the whole."""
    liked = liked_by(device, precision.autocast_dtype or precision.weight_dtype or torch.float32)
    return [] if liked is None else unliked_sizes(network, liked)


def liked_by(device: torch.device, dtype: torch.dtype) -> Liked | None:
    """What ``device`` likes; None where sizes do not matter much, or are not known."""
    is_16_bit = dtype in (torch.float16, torch.bfloat16)
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda" and is_16_bit:
        return Liked(name, aligned=8, tile=64)
    if device.type == "cuda" and dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return Liked("tf32", aligned=4, tile=32)
    if device.type == "cpu" and dtype is torch.bfloat16 and torch_private.has_amx():
        return Liked(name, aligned=16, tile=32)
    return None


def unliked_sizes(network: nn.Module, liked: Liked) -> list[str]:
    """The lines of :func:`size_warnings`, by the share of the multiplications they concern, the largest first."""
    sizes = list(_sizes_of(network))
    all_work = sum(each.work for each in sizes) / 2  # each product has two sides
    by_count: dict[int, list[_Size]] = defaultdict(list)
    for each in sizes:
        by_count[each.count].append(each)
    lines: list[tuple[float, str]] = []
    for count, having in by_count.items():
        share = sum({each.layer: each.work for each in having}.values()) / all_work
        next_count = -(-count // liked.tile) * liked.tile
        wasted = 1 - count / next_count
        is_aligned = count % liked.aligned == 0
        if (share if not is_aligned else share * wasted) < _LEAST_SHARE:
            continue
        problem = f"no multiple of {liked.tile}" if is_aligned else f"no multiple of {liked.aligned}"
        cost = f"{100 * wasted:.2g} % of each tile of {liked.tile} is computed for nothing"
        line = (
            f"size {count} ({_places(having)}; {100 * share:.0f} % of the multiplications) is {problem}, "
            f"which {liked.name} likes: {cost}; {next_count} would be a multiple of {liked.tile}"
        )
        lines.append((share, line))
    return [line for _, line in sorted(lines, reverse=True)]


def _sizes_of(network: nn.Module) -> Iterator[_Size]:
    for name, module in network.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or weight.numel() < _LEAST_WEIGHTS:
            continue
        if isinstance(module, nn.Linear):
            num_out, num_in = weight.shape
        elif type(module).__name__ == "Conv1D":  # the linear layer of Hugging Face's GPT-2
            num_in, num_out = weight.shape
        else:
            continue
        # Forward, the gradient of the input, and that of the weights where they are trained.
        work = weight.numel() * (3 if weight.requires_grad else 2)
        yield _Size(name, "input", num_in, work)
        yield _Size(name, "output", num_out, work)


def _places(sizes: list[_Size]) -> str:
    """``"output of lm_head"``; of many layers the first, and how many more."""
    first, *others = sizes
    more = f" and {len(others)} more" if others else ""
    return f"{first.side} of {first.layer or 'the model'}{more}"
