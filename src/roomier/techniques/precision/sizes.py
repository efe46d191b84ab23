"""Warnings about matmul sizes that are slow on a device.

[Note: efficient sizes]
Matrix units multiply tiles of a fixed size, and partially filled tiles waste computation. According to NVIDIA's "Matrix
Multiplication Background User's Guide" (section on tensor core requirements), sizes should be multiples of 16 bytes,
which are 8 numbers of 16 bits or 4 TF32 numbers. Before cuBLAS 11, tensor cores were not used for other sizes. On an
A100 and later GPUs, multiples of 128 bytes (64 or 32 numbers) are most efficient. Intel's AMX multiplies tiles of 16
rows of 64 bytes, which contain 32 bfloat16 numbers (Intel 64 and IA-32 Architectures Optimization Reference Manual,
chapter on AMX).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from roomier.core import torch_private
from roomier.techniques.precision.policy import Precision

_LEAST_WEIGHTS = 2**16  # Smaller layers hardly affect the time of a step.
_LEAST_SHARE = 0.01  # Problems that affect a smaller share of the multiplications are not reported.


@dataclass(frozen=True)
class Liked:
    """Efficient matmul sizes for one dtype on a device.

    Attributes:
        name: name of the dtype.
        aligned: sizes should be a multiple of this number, so that reads are aligned.
        tile: sizes should be a multiple of this number, so that tiles are full.
    """

    name: str
    aligned: int
    tile: int


@dataclass(frozen=True)
class _Size:
    """Number of inputs or outputs of a linear layer.

    Attributes:
        layer: name of the layer.
        side: ``"input"`` or ``"output"``.
        count: number of inputs or outputs.
        work: number of multiplications per token in the forward and backward passes.
    """

    layer: str
    side: str
    count: int
    work: int


def size_warnings(network: nn.Module, precision: Precision, device: torch.device) -> list[str]:
    """Return one warning for each inefficient size of linear layers that affects the speed of the model."""
    liked = liked_by(device, precision.autocast_dtype or precision.weight_dtype or torch.float32)
    return [] if liked is None else unliked_sizes(network, liked)


def liked_by(device: torch.device, dtype: torch.dtype) -> Liked | None:
    """Return the efficient sizes for ``dtype`` on ``device``, or None if sizes have little effect or the efficient
    sizes are unknown."""
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
    """Return the warnings of :func:`size_warnings`, in descending order of their share of the multiplications."""
    sizes = list(_sizes_of(network))
    # Each matmul has two sizes, the number of inputs and the number of outputs.
    all_work = sum(each.work for each in sizes) / 2
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
        problem = f"not a multiple of {liked.tile}" if is_aligned else f"not a multiple of {liked.aligned}"
        cost = f"{100 * wasted:.2g} % of the computation in tiles of {liked.tile} is wasted"
        line = (
            f"size {count} ({_places(having)}; {100 * share:.0f} % of the multiplications) is {problem}, "
            f"which is inefficient in {liked.name}: {cost}. {next_count} is a multiple of {liked.tile}"
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
        elif type(module).__name__ == "Conv1D":  # Conv1D is the linear layer of Hugging Face's GPT-2
            num_in, num_out = weight.shape
        else:
            continue
        # Matmuls of forward, of the input gradient and, if the weights are trained, of the weight gradient.
        work = weight.numel() * (3 if weight.requires_grad else 2)
        yield _Size(name, "input", num_in, work)
        yield _Size(name, "output", num_out, work)


def _places(sizes: list[_Size]) -> str:
    """Return text such as ``"output of lm_head"``, including the number of other layers if several layers have the same
    size."""
    first, *others = sizes
    more = f" and {len(others)} more" if others else ""
    return f"{first.side} of {first.layer or 'the model'}{more}"
