"""Wrappers for the blocks of a region."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.hugging_face import is_cache
from roomier.core.wrapped_forward import WrappedForward, install
from roomier.techniques.context.attention import replaced_attention
from roomier.techniques.context.exchange import ContextGroup
from roomier.techniques.context.region import FIELD, RegionBlock, SequenceRegion, rejected

_LENGTH = "roomier_sequence_length"  # keyword argument that an outer wrapper passes to the inner wrapper


class ExchangeForward(WrappedForward):
    """Inner wrapper, whose attention exchanges slices of the sequence for heads. Recomputation repeats it."""

    def __init__(self, module: nn.Module, group: ContextGroup) -> None:
        super().__init__(module)
        self._group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        length = kwargs.pop(_LENGTH, None)
        if length is None:
            return self.forward(*args, **kwargs)
        with replaced_attention(partial(self._group.attention, length)):
            return self.forward(*args, **kwargs)


class _Chain:
    """State of a chain of blocks in the current forward pass.

    Attributes:
        length: number of tokens in the full sequence; None if the blocks run on the full sequence, and outside of the
            chain.
        recent: lengths since the last backward pass in which the model recomputed a block.
        is_gathered: True if the last block gathers its outputs.
    """

    length: int | None = None
    is_gathered = False

    def __init__(self) -> None:
        self.recent: set[int | None] = set()
        self._mode: object = None

    def begin(self, length: int | None, size: int) -> None:
        """Begin a forward pass with ``length`` tokens.

        Raises:
            RoomierError: the earlier forward pass skipped the last block, so its hidden state remained a slice.
        """
        if self.length is not None and self.is_gathered:
            problem = "is not supported, because a forward pass skipped the last block"
            raise rejected(size, problem, "Run all blocks in each batch, without layerdrop")
        mode = torch.is_grad_enabled()
        if mode is not self._mode:
            self.recent, self._mode = set(), mode
        self.length = length
        self.recent.add(length)

    def length_in_backward(self, size: int) -> int | None:
        """Return the length for a block that the model itself recomputes, for example with
        ``torch.utils.checkpoint``."""
        self._mode = None
        if len(self.recent) > 1:
            problem = "is not supported, because the model recomputes its blocks, and a step has sequences of "
            problem += f"{len(self.recent)} lengths"
            raise rejected(size, problem, "Use Trainer(activation_checkpointing='full') instead")
        return next(iter(self.recent), None)


class SliceForward(WrappedForward):
    """Outer wrapper, which slices the arguments of a block and gathers the outputs of the last block of a chain."""

    def __init__(self, module: nn.Module, block: RegionBlock, chain: _Chain, group: ContextGroup) -> None:
        super().__init__(module)
        self._name = type(module).__name__
        self._block, self._chain, self._group = block, chain, group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = torch_private.split_leaves((args, kwargs))
        is_recomputed = torch_private.is_in_backward()
        if self._block.is_first:
            length = self._length(leaves, any(map(is_cache, (*args, *kwargs.values()))))
            if not is_recomputed:
                self._chain.begin(length, self._group.size)
        else:
            length = self._chain.length_in_backward(self._group.size) if is_recomputed else self._chain.length
        if length is None:
            return self.forward(*args, **kwargs)
        if len(leaves) != self._block.num_leaves:
            problem = f"is not supported, because the number of arguments of {self._name} varies between batches"
            raise rejected(self._group.size, problem, "Pass all arguments in each batch")
        for index, dim in self._block.sliced:
            if isinstance(leaf := leaves[index], Tensor):
                if leaf.shape[dim] != length:
                    problem = f"requires {length} tokens in dimension {dim} of an argument of {self._name}"
                    action = f"Pass an argument of this length instead of {tuple(leaf.shape)}"
                    raise rejected(self._group.size, problem, action)
                leaves[index] = self._group.slice(leaf, dim)
        args, kwargs = torch_private.join_leaves(leaves, form)
        inner = {_LENGTH: length} if self._block.has_attention else {}
        try:
            output = self.forward(*args, **kwargs, **inner)
        except BaseException:
            self._chain.length = None
            raise
        if not self._block.gathered:
            return output
        self._chain.length = None
        leaves, form = torch_private.split_leaves(output)
        for index, dim in self._block.gathered:
            leaves[index] = self._group.gather(leaves[index], dim, length)
        return torch_private.join_leaves(leaves, form)

    def _length(self, leaves: Sequence[Any], has_cache: bool) -> int | None:
        """Return the number of tokens; None in evaluation if the sequence is too short, or if keys are cached."""
        index, dim = next((index, dim) for index, dim in self._block.sliced if isinstance(leaves[index], Tensor))
        length: int = leaves[index].shape[dim]
        if torch.is_grad_enabled() and length >= 2 * self._group.size:
            return length
        if not torch.is_grad_enabled():
            return None if has_cache or length < 2 * self._group.size else length
        problem = f"requires at least {2 * self._group.size} tokens, two for each rank, but the sequence has {length}"
        raise RoomierError(FIELD, self._group.size, problem, "Use longer sequences or a smaller context_parallel_size")


def install_exchange(network: nn.Module, region: SequenceRegion, group: ContextGroup) -> None:
    """Install the inner wrappers of ``region`` in the blocks of ``network``. Call this function before the wrappers
    that recompute activations are installed."""
    for each in region.blocks:
        if each.has_attention:
            block = network.get_submodule(each.name)
            install(block, ExchangeForward(block, group))


def install_slices(network: nn.Module, region: SequenceRegion, group: ContextGroup) -> None:
    """Install the outer wrappers of ``region``, which require the inner wrappers of :func:`install_exchange`."""
    chain = _Chain()
    for each in region.blocks:
        chain = _Chain() if each.is_first else chain
        chain.is_gathered |= bool(each.gathered)
        block = network.get_submodule(each.name)
        install(block, SliceForward(block, each, chain, group))
