"""Which part of a model runs, told to who wants to know: while it computes, and in its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.tree import tensors
from roomier.loss.lazy_logits import LazyLogits

_PLACE = "_roomier_place"  # on a tensor: which part made it


def named_places(network: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The parts of ``network`` that are told apart: its blocks, and the leaves outside them; with their names."""
    in_blocks = {part for block in blocks for part in block.modules()}
    return {
        module: name
        for name, module in network.named_modules()
        if module in blocks or (module not in in_blocks and not any(True for _ in module.children()))
    }


@contextmanager
def telling_places(places: dict[nn.Module, str], tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``tell`` is called with the name of the part that runs from then on; empty outside of all.

    In a backward a part begins when the gradient of its output is there, and ends when that of its input is.
    """
    handles = []
    for module, name in places.items():
        enter, leave = _hooks(name, tell)
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(name: str, tell: Callable[[str], None]) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        others = (each for each in tensors([args, kwargs]) if not hasattr(each, _PLACE))
        _at_gradient_of(others, lambda: tell(""))  # what another part made tells its own
        tell(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        made = list(tensors(output))
        for each in made:
            setattr(each, _PLACE, name)
        _at_gradient_of(made, lambda: tell(name))
        tell("")

    return enter, leave


def _at_gradient_of(found: Iterable[Tensor], call: Callable[[], None]) -> None:
    if torch.is_grad_enabled():
        for tensor in found:
            if tensor.requires_grad and not isinstance(tensor, LazyLogits):  # no gradient comes to these
                tensor.register_hook(lambda gradient: call())  # type: ignore[no-untyped-call]
