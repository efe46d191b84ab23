"""Forward pass of a block that saves selected activations for the backward pass and recomputes all others.

[Note: recomputation]
Blocks use ``torch.utils.checkpoint`` with ``use_reentrant=False``. The autograd graph of a block is then the same as
without recomputation, but its saved tensors are placeholders: when the backward pass first reads one of them, a second
forward pass computes all of them, with the same random states and autocast state as the first. The inputs of a block
need not require gradients, and gradient hooks and ``backward(inputs=...)`` are supported. The reentrant variant would
instead run a separate backward pass inside the first one and bypass the hooks that reduce gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from roomier.core import torch_private
from roomier.core.wrapped_forward import WrappedForward, install
from roomier.techniques.activation.copies import Offload
from roomier.techniques.activation.repeat import Buffers, Surroundings, without_caches
from roomier.techniques.activation.selective import OnDevice, Products, Saved, products_kept


class Keep(StrEnum):
    """Activations that a block saves for backward."""

    ALL = "all"
    """All activations. Nothing is recomputed."""
    PRODUCTS = "products"
    """The input of the block, and the results of matrix products, convolutions and attention."""
    INPUT = "input"
    """Only the input of the block."""


MakeContext = Callable[[], AbstractContextManager[Any]]
"""Function that creates the context of a forward pass, such as ``saved_tensors_hooks``, which can save activations in a
different form."""


class BlockForward(WrappedForward):
    """Wrapper for the ``forward`` method of a block. Without gradients, as in evaluation, the original method runs.

    Args:
        module: the block.
        keep: activations that are saved for backward.
        offload: object that moves saved tensors to host memory or disk; None to keep them on the device.
        context: context of a forward pass with gradients that saves all activations.

    Attributes:
        module: the block.
        keep: activations that are saved for backward. ``keep`` can be changed between steps.
        offloads: True if saved tensors are offloaded. ``offloads`` can be changed between steps if ``offload`` is set.
        offload: the argument ``offload``.
    """

    def __init__(
        self,
        module: nn.Module,
        keep: Keep = Keep.ALL,
        offload: Offload | None = None,
        context: MakeContext = nullcontext,
    ) -> None:
        super().__init__(module)
        self.module = module
        self.keep = keep
        self.offloads = offload is not None
        self.offload = offload
        self._context = context
        self._buffers = Buffers(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._traced(args, kwargs)
        if self.module.training:
            is_repeated = self.keep is not Keep.ALL
            args = tuple(without_caches(dict(enumerate(args)), is_repeated=is_repeated).values())
            kwargs = without_caches(kwargs, is_repeated=is_repeated)
        if not self.offloads:
            return self._keeping(OnDevice, args, kwargs)
        assert self.offload is not None, "the Plan does not offload activations"
        with self.offload.visit() as move:
            return self._keeping(lambda tensor: move(tensor) or OnDevice(tensor), args, kwargs)

    def _keeping(self, save: Callable[[Tensor], Saved], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.keep is Keep.ALL:
            with self._context():
                return self.forward(*args, **kwargs)
        found: list[Tensor] = []
        leaves, form = torch_private.split_leaves((args, kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[index] = _TensorPlaceholder(len(found))
                found.append(leaf)
        products = Products(save) if self.keep is Keep.PRODUCTS else None
        call = _BlockCall(self.forward, leaves, form, Surroundings(self._buffers), products)
        # Tensors are passed as arguments, so that ``checkpoint`` saves them and restores the random generators of their
        # devices.
        return checkpoint(call, *found, use_reentrant=False)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass while the compiler traces it. The saved tensors are offloaded by :class:`MovingForward`,
        not by this method."""
        if self.keep is Keep.ALL:
            with self._context():
                return self.forward(*args, **kwargs)
        how: dict[str, Any] = {"context_fn": products_kept} if self.keep is Keep.PRODUCTS else {}
        return checkpoint(self.forward, *args, use_reentrant=False, **how, **kwargs)


class MovingForward(WrappedForward):
    """Wrapper for the compiled forward pass of a block. It offloads the tensors that this forward pass saves."""

    def __init__(self, block: BlockForward, offload: Offload) -> None:
        super().__init__(block.module)
        self._block = block
        self._offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self._block.offloads):
            return self.forward(*args, **kwargs)
        with self._offload.visit():
            return self.forward(*args, **kwargs)


@dataclass(eq=False)
class _BlockCall:
    """Repeatable call of a block.

    Attributes:
        forward: original ``forward`` method of the block.
        leaves: leaves of the positional and keyword arguments, with a :class:`_TensorPlaceholder` for each tensor.
        form: structure of the containers that hold the leaves. The containers are recreated for each call, because some
            containers, such as ``PackedSequence``, accept only tensors.
        surroundings: buffer values and random states of Python and NumPy that are restored for the second forward pass.
        products: saved results of matrix products and attention; None to recompute all results.
        is_first: True before the first forward pass.
    """

    forward: Callable[..., Any]
    leaves: Sequence[Any]
    form: Any
    surroundings: Surroundings
    products: Products | None
    is_first: bool = True

    def __call__(self, *found: Tensor) -> Any:
        leaves = [found[leaf.index] if isinstance(leaf, _TensorPlaceholder) else leaf for leaf in self.leaves]
        args, kwargs = torch_private.join_leaves(leaves, self.form)
        if not self.is_first:
            with self.surroundings.restored(), nullcontext() if self.products is None else self.products.replayed():
                return self.forward(*args, **kwargs)
        self.is_first = False
        with nullcontext() if self.products is None else self.products.recorded():
            output = self.forward(*args, **kwargs)
        self.surroundings.end_first_forward()
        return output


@dataclass(frozen=True)
class _TensorPlaceholder:
    """Placeholder for a tensor in the arguments of a call."""

    index: int


class Recompute:
    """Blocks that recompute or offload activations, with the methods that the engine calls in each step.

    Attributes:
        blocks: the :class:`BlockForward` of each block, in the order of the network.
    """

    def __init__(self, blocks: Sequence[BlockForward]) -> None:
        self.blocks = list(blocks)

    def move_compiled(self) -> None:
        """Offload the saved tensors of compiled blocks. Call this method after the blocks are compiled."""
        for block in self.blocks:
            if block.offload is not None:
                install(block.module, MovingForward(block, block.offload))

    def close(self) -> None:
        """Remove the offloaded activations."""
        for offload in {block.offload for block in self.blocks}:
            if offload is not None:
                offload.copies.close()

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        """Begin a training step. Call this method before the first micro-batch of the step.

        Args:
            optimizers: optimizers that update the network in this run.
            batches: micro-batches of the step.
        """

    def end_step(self) -> None:
        """End a training step. Call this method after the last backward pass of the step, before the update."""

    def abandon_step(self) -> None:
        """Discard a training step that an error ended. Call this method instead of :meth:`end_step`."""
