"""Check that a block computes the same on slices of the sequence, on one process and without communication.

[Note: position-wise check]
Attention is replaced by a position-wise function. If a block mixes tokens only in attention, its output on slices of a
sequence then equals the slices of its output, and its gradients are the sums over the slices. The block is a copy with
random weights and inputs, because zeros, which some initializers write, would hide an operation.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.hugging_face import is_cache
from roomier.core.wrapped_forward import unwrap
from roomier.techniques.context.attention import Attention, replaced_attention
from roomier.techniques.context.region import CheckedCall, rejected

MAX_WIDE_PARAMETERS = 50_000_000
"""Largest number of parameters of a block that is checked in float64."""
_LENGTH, _FIRST = 13, 8  # tokens in the sequence of the check, and in the first of its two slices


class _MixesTokensError(Exception):
    """Reason why a block does not support slices."""


def check_blocks(network: nn.Module, examples: Sequence[CheckedCall], size: int) -> list[str]:
    """Check one block of each kind, and each later layer; see [Note: position-wise check].

    Args:
        network: the model, on any device.
        examples: a call of each block and of each later layer in the region.
        size: number of ranks that share a sequence, for the error.

    Returns:
        Names of the later layers that fail the check.

    Raises:
        RoomierError: a block mixes tokens outside of attention, or computes masks from its slice.
    """
    called = {each.name: (network.get_submodule(each.name), each) for each in reversed(examples)}
    blocks = {_kind(block, each): (block, each) for block, each in called.values() if each.is_block}
    for block, example in blocks.values():
        if error := _failure(block, example):
            reason = str(error) if isinstance(error, _MixesTokensError) else f"{type(error).__name__}: {error}"
            problem = f"is not supported, because {example.name} does not run on slices of the sequence: {reason}"
            action = "Mix tokens only in scaled_dot_product_attention, with masks that the block receives"
            raise rejected(size, problem, action) from error
    return [each.name for layer, each in called.values() if not each.is_block and _failure(layer, each)]


def _failure(module: nn.Module, example: CheckedCall) -> Exception | None:
    is_large = sum(each.numel() for each in module.parameters()) > MAX_WIDE_PARAMETERS
    try:
        _check(module, example, [torch.float32] if is_large else [torch.float64, torch.float32])
    except Exception as error:
        return error
    return None


def _kind(block: nn.Module, example: CheckedCall) -> Hashable:
    """Return a value that differs if only some blocks of a class have, for example, a convolution.

    Numbers only count as zero or not, because the index of a layer and its dropout rate do not mix tokens.
    """

    def setting(value: object) -> Hashable:
        is_setting = isinstance(value, (str, FunctionType, type(None)))
        return bool(value) if isinstance(value, (int, float)) else value if is_setting else type(value)

    parts = [
        (name, type(part), *((key, setting(value)) for key, value in vars(part).items()))
        for name, part in block.named_modules()
    ]
    shapes = [tuple(each.shape) for each in block.parameters()]
    return tuple(parts), tuple(shapes), tuple(setting(leaf) for leaf in example.leaves)


def _check(block: nn.Module, example: CheckedCall, dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(0)
                return _compare(_with_random_weights(block, dtype), example, dtype)
        except (RuntimeError, TypeError):  # some kernels do not support float64
            if dtype is dtypes[-1]:
                raise
    return None


def _compare(block: nn.Module, example: CheckedCall, dtype: torch.dtype) -> None:
    leaves = [_like(leaf, dims, dtype) for leaf, dims in zip(example.leaves, example.dims, strict=True)]
    calls = _Calls(dtype)
    with calls.recorded():
        whole, gradients = _run(block, example, leaves, (0, _LENGTH), calls)
        expected = calls.signatures
        parts = [
            _run(block, example, leaves, place, calls, expected) for place in ((0, _FIRST), (_FIRST, _LENGTH - _FIRST))
        ]
    tolerance = 1e-4 if dtype is torch.float32 else 1e-6 if calls.is_cast else 1e-9
    for index, (_, dim) in enumerate(example.outputs):
        joined = torch.cat([outputs[index] for outputs, _ in parts], dim)
        if _distance(joined, whole[index]) > tolerance:
            raise _MixesTokensError("its output depends on other tokens than through attention")
    num_parameters = len(gradients) - len(example.inputs)
    for index, gradient in enumerate(gradients):
        slices = [found[index] for _, found in parts]
        is_parameter = index < num_parameters
        total = sum(slices) if is_parameter else torch.cat(slices, example.inputs[index - num_parameters][1])
        if _distance(torch.as_tensor(total), gradient) > tolerance:
            raise _MixesTokensError("its gradients depend on other tokens than through attention")


def _run(
    block: nn.Module,
    example: CheckedCall,
    leaves: Sequence[Any],
    place: tuple[int, int],
    calls: _Calls,
    expected: Sequence[Any] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Run ``block`` on a slice of the sequence.

    Args:
        place: first token of the slice, and its number of tokens.
        expected: calls of attention on the full sequence.

    Returns:
        The outputs with a sequence dimension; and the gradients of the parameters, followed by the gradients of the
        floating-point inputs with a sequence dimension.
    """
    inputs, sources = list(leaves), list(block.parameters())
    for index, dim in example.sliced:
        inputs[index] = leaves[index].narrow(dim, *place).clone()
    for index, _ in example.inputs:
        sources.append(inputs[index].requires_grad_())
        inputs[index] = inputs[index].clone()  # the block may modify its arguments
    args, kwargs = torch_private.join_leaves(inputs, example.form)
    torch.manual_seed(1)  # layers that draw one number per sample draw the same numbers for each slice
    calls.signatures = []
    leaves_of_output = torch_private.split_leaves(block(*args, **kwargs))[0]
    if expected is not None and calls.signatures != expected:
        raise _MixesTokensError("it passes other arguments to attention if the sequence is shorter")
    outputs = [leaves_of_output[index] for index, _ in example.outputs]
    loss = torch.zeros((), dtype=torch.float64)
    for output, (_, dim) in zip(outputs, example.outputs, strict=True):
        if output.shape[dim] != place[1]:
            raise _MixesTokensError(f"its output has {output.shape[dim]} tokens if its input has {place[1]}")
        if not output.is_floating_point():
            continue
        shape = [*output.shape[:dim], _LENGTH, *output.shape[dim + 1 :]]
        generator = torch.Generator().manual_seed(2)
        loss = loss + (output * torch.randn(shape, generator=generator, dtype=output.dtype).narrow(dim, *place)).sum()
    gradients = torch.autograd.grad(loss, sources, allow_unused=True)
    found = [torch.zeros_like(s) if g is None else g for s, g in zip(sources, gradients, strict=True)]
    return [output.detach() for output in outputs], found


class _Calls:
    """Record of the calls of attention, which a position-wise function computes.

    Attributes:
        signatures: arguments of the calls that must not depend on the slice.
        is_cast: True if the block computes in a narrower dtype than its weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.signatures: list[Any] = []
        self.is_cast = False
        self._dtype = dtype

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Return a context that records attention, without dropout."""
        functions = {F.dropout: _without_dropout, torch.dropout: _without_dropout}
        with (
            torch_private.replace_functions(functions),
            replaced_attention(self._attention),
            torch_private.intercept(self._on_operation),
        ):
            yield

    def _on_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        output = func(*args, **kwargs)
        tensors = torch_private.iter_tensors(output)
        self.is_cast |= any(each.is_floating_point() and each.dtype is not self._dtype for each in tensors)
        return output

    def _attention(
        self,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        """Return a function of the query, key and value at the same position."""
        if key.shape[2] != query.shape[2]:
            raise _MixesTokensError(f"it computes attention of {query.shape[2]} queries over {key.shape[2]} keys")
        if attn_mask is not None and {*attn_mask.shape[-2:]} - {1, _LENGTH}:
            lengths = tuple(attn_mask.shape[-2:])
            raise _MixesTokensError(f"its mask has {lengths} tokens if the full sequence has {_LENGTH}")
        self.signatures.append((attn_mask is None, dropout_p, is_causal, scale, query.shape[1], key.shape[1]))
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        return torch.tanh((query * key).sum(-1, keepdim=True)) * value + value


def _without_dropout(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input


def _with_random_weights(block: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of ``block`` on the CPU with random weights."""
    memo: dict[int, Any] = {}
    for each in (*block.parameters(), *block.buffers()):
        is_float = each.is_floating_point()
        made = torch.empty(each.shape, dtype=dtype if is_float else each.dtype)
        if isinstance(each, nn.Parameter):
            made.normal_(std=max(each.shape[-1:], default=1) ** -0.5) if is_float else made.zero_()
            made = nn.Parameter(made, requires_grad=is_float)
        elif each.is_meta:
            made.normal_() if is_float else made.zero_()
        else:
            made.copy_(each)
        memo[id(each)] = made
    copied = copy.deepcopy(block, memo)
    unwrap(copied)
    return copied.train()


def _like(leaf: Any, dims: Sequence[int], dtype: torch.dtype) -> Any:
    """Return an argument with the shape of ``leaf`` for a sequence of ``_LENGTH`` tokens."""
    if is_cache(leaf):
        return None
    if not isinstance(leaf, Tensor):
        return leaf
    shape = [_LENGTH if dim in dims else size for dim, size in enumerate(leaf.shape)]
    if leaf.dtype is torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    if leaf.is_floating_point():
        return torch.randn(shape, dtype=dtype)
    if len(dims) != 1:
        return torch.zeros(shape, dtype=leaf.dtype)
    positions = torch.arange(_LENGTH).view(*[-1 if dim in dims else 1 for dim in range(leaf.dim())])
    return positions.expand(shape).to(leaf.dtype)


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest value of ``other``; infinite if it is not a number."""
    if not other.numel():
        return 0.0
    distance = float((one - other).abs().max() / (other.abs().max() + 1e-30))
    return distance if distance == distance else float("inf")
