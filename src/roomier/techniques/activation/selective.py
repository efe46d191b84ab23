"""Saving of expensive results: the results of matrix products, convolutions and attention.

[Note: not torch's selective contexts]
``torch.utils.checkpoint.create_selective_checkpoint_contexts`` counts every operation of both forward passes, including
the operations of hooks that all-gather parameters, which differ between the two passes. If the result of attention is
saved, these contexts do not advance the random generator in the second forward pass as attention did in the first, so
later dropout differs. The tensors that they save cannot be offloaded either. The compiler supports these contexts, so
compiled blocks use them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from roomier.core import torch_private
from roomier.core.device.rng import generator_state, set_generator_state

PRODUCTS = torch_private.product_operators()
ATTENTION = torch_private.attention_operators()  # some kernels sample their own dropout


@runtime_checkable
class Saved(Protocol):
    """Protocol of a saved tensor."""

    def get(self) -> Tensor | None:
        """Return the tensor; None if it was modified in place after it was saved."""


class OnDevice:
    """Tensor that is saved on its device.

    Args:
        tensor: tensor to save.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = torch_private.detached(tensor)
        self._version = torch_private.version_of(self._tensor)

    def get(self) -> Tensor | None:
        """Return the tensor; None if it was modified in place after it was saved."""
        return self._tensor if torch_private.version_of(self._tensor) == self._version else None


@dataclass
class _Result:
    """Result of an operator.

    Attributes:
        operator: operator that computed ``output``.
        output: output, in which a :class:`Saved` replaces each tensor.
        device: device of the first tensor in the output.
        generator_state: random state of ``device`` after the operator, if the operator can sample random numbers.
    """

    operator: Any
    output: Any
    device: torch.device
    generator_state: Tensor | None


class Products:
    """Saved results of the matrix products, convolutions and attention of one forward pass, for use in the second pass.

    Args:
        save: function that saves a tensor.
    """

    def __init__(self, save: Callable[[Tensor], Saved]) -> None:
        self._save = save
        self._results: list[_Result | None] = []
        self._next = 0

    def recorded(self) -> AbstractContextManager[Any]:
        """Return the context in which the first forward pass saves its products."""
        return torch_private.intercept(self._compute_and_save)

    def replayed(self) -> AbstractContextManager[Any]:
        """Return the context in which the second forward pass reuses saved products. A third forward pass (for a
        retained graph) computes all products."""
        self._next = 0
        return torch_private.intercept(self._take_or_compute)

    def _compute_and_save(self, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
        output = operator(*args, **kwargs)
        if operator in PRODUCTS or operator in ATTENTION:
            first = next(torch_private.iter_tensors(output))
            state = generator_state(first.device) if operator in ATTENTION else None
            saved = torch_private.map_leaves(
                lambda each: self._save(each) if isinstance(each, Tensor) else each, output
            )
            self._results.append(_Result(operator, saved, first.device, state))
        return output

    def _take_or_compute(self, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if operator in PRODUCTS or operator in ATTENTION:
            result = self._take(operator)
            if result is not None:
                return result
        return operator(*args, **kwargs)

    def _take(self, operator: Any) -> Any:
        """Return the next saved result if it comes from ``operator``; None if the result must be computed."""
        index, self._next = self._next, self._next + 1
        result = self._results[index] if index < len(self._results) else None
        if result is None or result.operator is not operator:
            return None
        self._results[index] = None  # freed during the backward pass
        is_whole = True

        def get(leaf: Any) -> Any:
            nonlocal is_whole
            if not isinstance(leaf, Saved):
                return leaf
            tensor = leaf.get()
            is_whole = is_whole and tensor is not None  # None if a layer such as nn.ReLU(inplace=True) modified it
            return tensor

        output = torch_private.map_leaves(get, result.output)
        if not is_whole:
            return None
        if result.generator_state is not None:
            set_generator_state(result.device, result.generator_state)
        return output


def products_kept() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts for the first and the second forward pass of a compiled block that saves products."""
    operators = sorted(PRODUCTS | ATTENTION, key=str)
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(operators)  # type: ignore[no-untyped-call]
    return contexts
