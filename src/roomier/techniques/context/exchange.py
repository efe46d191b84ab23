"""Exchange of tensors between the ranks that share a sequence.

[Note: slices]
Slices are contiguous and their lengths differ by at most one token, so no token is padded. Outside of the region, each
rank of a group computes the same values, and its gradients are a partial sum: a slice passes zeros to the other tokens
in backward, and the backward pass of a gather adds the gradients of all ranks. If the loss is divided by the number of
ranks in the group, the sum over all ranks is therefore the gradient of every parameter, inside and outside of the
region.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.errors import RoomierError
from roomier.techniques.context.attention import Attention

_AT_HEADS, _AT_TOKENS = 1, 2
Shape = list[int]


class ContextGroup:
    """The ranks that share a sequence.

    Args:
        process_group: the process group of these ranks.

    Attributes:
        size: number of ranks in the group.
        rank: position of this rank in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)

    def __deepcopy__(self, memo: Any) -> ContextGroup:
        return self  # a process group cannot be copied

    def lengths(self, length: int) -> list[int]:
        """Return the length of each rank's slice of ``length`` tokens."""
        return [length // self.size + (rank < length % self.size) for rank in range(self.size)]

    def slice(self, tensor: Tensor, dim: int) -> Tensor:
        """Return a copy of this rank's slice of ``tensor`` along ``dim``."""
        own = _parts(tensor, self.lengths(tensor.shape[dim]), dim)[self.rank]
        return own.clone(memory_format=torch.contiguous_format)

    def gather(self, tensor: Tensor, dim: int, length: int) -> Tensor:
        """Return the full tensor of ``length`` tokens along ``dim``, given this rank's slice. In the backward pass, the
        gradients of all ranks are added."""
        whole: Tensor = _Gather.apply(tensor, self, dim, length)  # type: ignore[no-untyped-call]
        return whole

    def attention(
        self,
        length: int,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        """Compute attention over the full sequence from the slices of this rank (Ulysses, Jacobs et al. 2023).

        An all-to-all replaces slices of the sequence by groups of heads before attention, and does the reverse after
        attention.

        Args:
            length: number of tokens in the full sequence.
            attention: function that computes attention.
            query: ``(samples, heads, tokens of this rank, width)``, as ``key`` and ``value``.
            attn_mask: mask over the full sequence.
            dropout_p, is_causal, options: arguments of ``scaled_dot_product_attention``.
        """
        self._check(length, query, key, attn_mask)
        key, value = self._repeated(query, key), self._repeated(query, value)
        query, key, value = self._exchange([query, key, value], length, _AT_HEADS)
        if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:
            attn_mask = attn_mask.chunk(self.size, -3)[self.rank]
        output = attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return self._exchange([output], length, _AT_TOKENS)[0]

    def _check(self, length: int, query: Tensor, key: Tensor, attn_mask: Tensor | None) -> None:
        own = self.lengths(length)[self.rank]
        if query.shape[2] != own or key.shape[2] != own:
            problem = (
                f"requires self-attention over the {own} tokens of this rank, but attention received {query.shape[2]} "
                f"queries and {key.shape[2]} keys"
            )
            action = "Use context_parallel_size=1 for cross-attention and for caches of keys"
            raise RoomierError("context_parallel_size", self.size, problem, action)
        if attn_mask is not None and (attn_mask.shape[-1] not in (1, length) or attn_mask.shape[-2] not in (1, length)):
            problem = f"requires masks over all {length} tokens, but attention received {tuple(attn_mask.shape)}"
            action = "Compute the mask outside of the blocks, or use context_parallel_size=1"
            raise RoomierError("context_parallel_size", self.size, problem, action)

    def _repeated(self, query: Tensor, key: Tensor) -> Tensor:
        """Repeat the heads of ``key`` as rarely as possible, so that each rank receives the same number of heads."""
        num_heads, each = key.shape[1], query.shape[1] // key.shape[1]
        times = next(n for n in range(1, each + 1) if each % n == 0 and num_heads * n % self.size == 0)
        return key if times == 1 else key.repeat_interleave(times, 1)

    def _exchange(self, tensors: Sequence[Tensor], length: int, split: int) -> Sequence[Tensor]:
        if len({each.dtype for each in tensors}) > 1:  # for example, if a norm of the queries computes in float32
            return [self._exchange([each], length, split)[0] for each in tensors]
        exchanged: Sequence[Tensor] = _AllToAll.apply(self, length, split, *tensors)  # type: ignore[no-untyped-call]
        return exchanged

    def swap(self, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]]) -> list[list[Tensor]]:
        """Send the tensors ``sent[r]`` to each rank r in one message, and return the tensors that each rank sent, whose
        shapes are ``shapes[r]``."""
        buffer = sent[0][0].new_empty(sum(each.numel() for tensors in sent for each in tensors))
        sent_shapes = [[list(each.shape) for each in tensors] for tensors in sent]
        for views, tensors in zip(_split(buffer, sent_shapes), sent, strict=True):
            for view, each in zip(views, tensors, strict=True):
                view.copy_(each)
        counts, sent_counts = ([sum(map(math.prod, each)) for each in found] for found in (shapes, sent_shapes))
        received = buffer.new_empty(sum(counts))
        dist.all_to_all_single(received, buffer, counts, sent_counts, group=self._process_group)
        return _split(received, shapes)


def _split(buffer: Tensor, shapes: Sequence[Sequence[Shape]]) -> list[list[Tensor]]:
    """Return views of consecutive elements of ``buffer`` with these shapes."""
    sizes = [math.prod(shape) for group in shapes for shape in group]
    views = iter(_parts(buffer, sizes, 0))
    return [[next(views).view(shape) for shape in group] for group in shapes]


def _parts(tensor: Tensor, lengths: Sequence[int], dim: int) -> list[Tensor]:
    ends = accumulate(lengths)
    return [tensor.narrow(dim, end - length, length) for end, length in zip(ends, lengths, strict=True)]


def _with_size(tensor: Tensor, dim: int, size: int) -> list[int]:
    return [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]


class _AllToAll(torch.autograd.Function):
    """All-to-all of tensors ``(samples, heads, tokens, width)`` that splits dimension ``split`` and joins the other of
    heads and tokens."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, length: int, split: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        joined = _AT_HEADS + _AT_TOKENS - split
        ctx.arguments = group, length, joined
        lengths = group.lengths(length)
        if split == _AT_HEADS:
            parts = [each.chunk(group.size, _AT_HEADS) for each in tensors]
            shapes = [[_with_size(own[0], _AT_TOKENS, each) for own in parts] for each in lengths]
        else:
            parts = [tuple(_parts(each, lengths, _AT_TOKENS)) for each in tensors]
            shapes = [[list(own[group.rank].shape) for own in parts]] * group.size
        received = group.swap(list(zip(*parts, strict=True)), shapes)
        return tuple(torch.cat(each, joined) for each in zip(*received, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_AllToAll.apply(*ctx.arguments, *gradients)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ContextGroup, dim: int, length: int) -> Tensor:
        ctx.arguments = group, dim, length
        shapes = [[_with_size(tensor, dim, each)] for each in group.lengths(length)]
        return torch.cat([each for [each] in group.swap([[tensor]] * group.size, shapes)], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        group, dim, length = ctx.arguments
        sent = _parts(gradient, group.lengths(length), dim)
        shapes = [[list(sent[group.rank].shape)]] * group.size
        [first], *others = group.swap([[each] for each in sent], shapes)
        for [each] in others:
            first = first + each
        return first, None, None, None
