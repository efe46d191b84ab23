"""Hooks that report which part of a model is running, in the forward and the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.tree import tensors
from roomier.techniques.loss.lazy_logits import LazyLogits

_PLACE = "_roomier_place"  # attribute of a tensor: name of the part of the model that returned the tensor


def named_places(network: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Return the parts of ``network`` that a dry run distinguishes, with their names: the blocks, and the leaf modules
    outside the blocks."""
    in_blocks = {part for block in blocks for part in block.modules()}
    return {
        module: name
        for name, module in network.named_modules()
        if module in blocks or (module not in in_blocks and not any(True for _ in module.children()))
    }


def is_inside(name: str, place: str) -> bool:
    """Return whether one of two parts of a model is the other part or contains it."""
    return f"{name}.".startswith(f"{place}.") or f"{place}.".startswith(f"{name}.")


@contextmanager
def reporting_places(places: dict[nn.Module, str], set_place: Callable[[str], None]) -> Iterator[None]:
    """Return a context that calls ``set_place`` with the name of each part when the part starts, and with "" when the
    part ends.

    In the backward pass, a part starts when the gradient of its output is complete, and ends when the gradient of its
    input is complete.

    Args:
        places: names of the parts, from :func:`named_places`.
        set_place: function that is called with each name.
    """
    with ExitStack() as stack:
        for module, name in places.items():
            enter, leave = _hooks(name, set_place)
            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            stack.enter_context(module.register_forward_hook(leave))
        yield


def _hooks(name: str, set_place: Callable[[str], None]) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        others = (each for each in tensors([args, kwargs]) if not hasattr(each, _PLACE))
        _at_gradient_of(others, lambda: set_place(""))  # the outputs of other parts report their own names
        set_place(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        made = list(tensors(output))
        for each in made:
            setattr(each, _PLACE, name)
        _at_gradient_of(made, lambda: set_place(name))
        set_place("")

    return enter, leave


def _at_gradient_of(found: Iterable[Tensor], call: Callable[[], None]) -> None:
    if torch.is_grad_enabled():
        for tensor in found:
            if tensor.requires_grad and not isinstance(tensor, LazyLogits):  # LazyLogits have no gradient
                tensor.register_hook(lambda gradient: call())  # type: ignore[no-untyped-call]
