"""Results that are dear to compute and are kept: those of matrix products, convolutions and attention.

[Note: not torch's selective contexts]
``torch.utils.checkpoint.create_selective_checkpoint_contexts`` counts every operation of both forwards, those of the
hooks that gather parameters included, which differ; it loses the draws of attention that is not computed again, so that
dropout after it differs; and what it keeps cannot wait elsewhere. The compiler knows it, and so it is used there.
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

PRODUCTS = torch_private.product_operators()
ATTENTION = torch_private.attention_operators()  # some draw their dropout themselves


@runtime_checkable
class Saved(Protocol):
    """A tensor put aside."""

    def get(self) -> Tensor | None:
        """It; None where it was written to since."""
        ...


class OnDevice:
    """A tensor kept where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = torch_private.detached(tensor)
        self._version = torch_private.version_of(self._tensor)

    def get(self) -> Tensor | None:
        return self._tensor if torch_private.version_of(self._tensor) == self._version else None


@dataclass
class _Result:
    """What an operator gave: ``output`` has a :class:`Saved` in the place of each tensor.

    Attributes:
        device: of its first tensor.
        generator_state: of ``device`` after it, where it may have drawn numbers.
    """

    operator: Any
    output: Any
    device: torch.device
    generator_state: Tensor | None


class Products:
    """The products of one forward, taken in the place of computing them in the second.

    Args:
        save: puts a tensor aside.
    """

    def __init__(self, save: Callable[[Tensor], Saved]) -> None:
        self._save = save
        self._results: list[_Result | None] = []
        self._next = 0

    def recorded(self) -> AbstractContextManager[Any]:
        """The first forward runs in it."""
        return torch_private.intercept(self._compute_and_save)

    def replayed(self) -> AbstractContextManager[Any]:
        """The second forward runs in it. A third one (of a graph that was kept) computes all."""
        self._next = 0
        return torch_private.intercept(self._take_or_compute)

    def _compute_and_save(self, operator: Any, types: Any, args: Any, kwargs: Any) -> Any:
        output = operator(*args, **kwargs)
        if operator in PRODUCTS or operator in ATTENTION:
            first = next(each for each in torch_private.iter_leaves(output) if isinstance(each, Tensor))
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
        """What ``operator`` gave at this place; None where it is to be computed."""
        index, self._next = self._next, self._next + 1
        result = self._results[index] if index < len(self._results) else None
        if result is None or result.operator is not operator:
            return None
        self._results[index] = None  # freed as the backward goes
        is_whole = True

        def get(leaf: Any) -> Any:
            nonlocal is_whole
            if not isinstance(leaf, Saved):
                return leaf
            tensor = leaf.get()
            is_whole = is_whole and tensor is not None  # else a layer wrote into it, nn.ReLU(inplace=True) say
            return tensor

        output = torch_private.map_leaves(get, result.output)
        if not is_whole:
            return None
        if result.generator_state is not None:
            set_generator_state(result.device, result.generator_state)
        return output


def generator_state(device: torch.device) -> Tensor:
    """Of torch's own generator for ``device``; does not wait for the device."""
    state: Tensor = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Put back what :func:`generator_state` gave."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state)


def products_kept() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The two contexts for a block that is compiled."""
    operators = sorted(PRODUCTS | ATTENTION, key=str)
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(operators)  # type: ignore[no-untyped-call]
    return contexts
