"""The forward of a block, which keeps for its backward what it is told to, and computes the rest again.

[Note: computing again]
``torch.utils.checkpoint`` without reentrance: a block's graph is the usual one, but what it saves are places, filled by
a second forward once the backward asks for the first of them. Inputs need no gradient, hooks on gradients and
``backward(inputs=...)`` work, and the generators of random numbers and autocast are as they were in the first forward.
The reentrant kind would run a backward of its own inside the backward, past the hooks that reduce gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from roomier.activation.offload import Offload
from roomier.activation.repeat import Buffers, Surroundings, without_caches
from roomier.activation.selective import OnDevice, Products, Saved, products_kept
from roomier.core import torch_private
from roomier.core.wrapped_forward import WrappedForward, install


class Keep(StrEnum):
    """What a block keeps for its backward."""

    ALL = "all"
    """Everything: nothing is computed again."""
    PRODUCTS = "products"
    """Its input, and the results of matrix products and attention."""
    INPUT = "input"
    """Its input alone."""


class BlockForward(WrappedForward):
    """A block's forward. Without gradients (evaluation) it is the block's own.

    Attributes:
        module: the block.
        keep: what is kept; may be changed between steps.
        offloads: whether that waits in host memory; may be changed between steps, where there is an ``offload``.
        offload: what moves it.
    """

    def __init__(self, module: nn.Module, keep: Keep = Keep.ALL, offload: Offload | None = None) -> None:
        super().__init__(module)
        self.module = module
        self.keep = keep
        self.offloads = offload is not None
        self.offload = offload
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
        assert self.offload is not None, "this Plan offloads no activations"
        with self.offload.visit() as move:
            return self._keeping(lambda tensor: move(tensor) or OnDevice(tensor), args, kwargs)

    def _keeping(self, save: Callable[[Tensor], Saved], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.keep is Keep.ALL:
            return self.forward(*args, **kwargs)
        found: list[Tensor] = []
        form = torch_private.map_leaves(lambda leaf: _taken_out(leaf, found), (args, kwargs))
        products = Products(save) if self.keep is Keep.PRODUCTS else None
        call = _Call(self.forward, form, Surroundings(self._buffers), products)
        # As arguments, tensors are saved for backward, and tell which device's generator is put back.
        return checkpoint(call, *found, use_reentrant=False)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the compiler sees: it knows ``checkpoint``. What it saves moves by :class:`MovingForward`."""
        if self.keep is Keep.ALL:
            return self.forward(*args, **kwargs)
        how: dict[str, Any] = {"context_fn": products_kept} if self.keep is Keep.PRODUCTS else {}
        return checkpoint(self.forward, *args, use_reentrant=False, **how, **kwargs)


class MovingForward(WrappedForward):
    """Around the compiled forward of a block, where no one sees what moves: it moves what the compiler saves."""

    def __init__(self, block: BlockForward, offload: Offload) -> None:
        super().__init__(block.module)
        self._block = block
        self._offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self._block.offloads):
            return self.forward(*args, **kwargs)
        with self._offload.visit():
            return self.forward(*args, **kwargs)


class _Call:
    """One call of a block, which may be made again.

    Args:
        form: arguments and keyword arguments, with a :class:`_Place` for each tensor.
    """

    def __init__(
        self, forward: Callable[..., Any], form: Any, surroundings: Surroundings, products: Products | None
    ) -> None:
        self._forward = forward
        self._form = form
        self._surroundings = surroundings
        self._products = products
        self._is_first = True

    def __call__(self, *found: Tensor) -> Any:
        args, kwargs = torch_private.map_leaves(
            lambda leaf: found[leaf.index] if isinstance(leaf, _Place) else leaf, self._form
        )
        if not self._is_first:
            with self._surroundings.restored(), nullcontext() if self._products is None else self._products.replayed():
                return self._forward(*args, **kwargs)
        self._is_first = False
        with nullcontext() if self._products is None else self._products.recorded():
            output = self._forward(*args, **kwargs)
        self._surroundings.end_first_forward()
        return output


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor among arguments."""

    index: int


def _taken_out(leaf: Any, found: list[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    found.append(leaf)
    return _Place(len(found) - 1)


class Recompute:
    """What the engine tells the blocks at each step.

    Attributes:
        blocks: in the order of the network.
    """

    def __init__(self, blocks: Sequence[BlockForward]) -> None:
        self.blocks = list(blocks)

    def move_compiled(self) -> None:
        """Call it when the blocks were compiled: what they save moves too."""
        for block in self.blocks:
            if block.offload is not None:
                install(block.module, MovingForward(block, block.offload))

    def begin_step(self, optimizers: Sequence[Optimizer], batches: Sequence[Any]) -> None:
        """Before the first of the micro-batches ``batches`` of a training step."""

    def end_step(self) -> None:
        """After the last backward of a training step, before the update."""

    def abandon_step(self) -> None:
        """In the place of :meth:`end_step`, where an error ended the step."""
