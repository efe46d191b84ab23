"""Forward passes whose changes to modules and whose logged values do not count."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core import torch_private
from roomier.run.logged.results import Results

Undo = Callable[[], Any]

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, str, bytes, type(None), tuple, frozenset)


@contextmanager
def muted(modules: Iterable[nn.Module], results: Results) -> Iterator[None]:
    """Undo all changes that a step makes to attributes and buffers of ``modules``, and ignore logged values.

    These changes include items added to lists, changes to counters, and updates of metric states.
    """
    restore = state_of(modules)
    results.is_muted = True
    try:
        yield
    finally:
        results.is_muted = False
        restore()


def state_of(modules: Iterable[nn.Module]) -> Undo:
    """Return a function that restores the current attributes and buffers of ``modules``, without their submodules."""
    undo: list[Undo] = []
    for each in modules:
        _keep(each, undo)

    def restore() -> None:
        for each in reversed(undo):
            each()

    return restore


def _keep(part: nn.Module, undo: list[Undo]) -> None:
    own = vars(part)
    for name, value in part.named_buffers(recurse=False):
        undo.append(partial(setattr, part, name, value))
        _keep_contents(value, undo)
    names = [name for name in own if name not in _OF_TORCH]
    kept = {name: own[name] for name in names if isinstance(own[name], (Tensor, list, dict, set, deque, *_PLAIN))}

    def restore() -> None:
        own.update(kept)
        for name in [name for name in own if name not in _OF_TORCH and name not in names]:
            del own[name]

    undo.append(restore)
    for value in kept.values():
        _keep_contents(value, undo)


def _keep_contents(value: Any, undo: list[Undo]) -> None:
    if isinstance(value, Tensor):
        if value.grad_fn is None:  # otherwise, an activation
            is_counted = torch.is_grad_enabled() and not value.is_inference()  # inference mode does not count writes
            version = torch_private.version_of(value) if is_counted else None
            undo.append(partial(_copy_back, value, value.detach().clone(), version))
    elif isinstance(value, (list, deque, dict, set)):
        content, fill = value.copy(), value.extend if isinstance(value, (list, deque)) else value.update

        def restore() -> None:
            value.clear()
            fill(content)

        undo.append(restore)
        for each in content.values() if isinstance(content, dict) else content:
            _keep_contents(each, undo)


def _copy_back(value: Tensor, copied: Tensor, version: int | None) -> None:
    if version is None or torch_private.version_of(value) != version:  # autograd rejects writes to a saved tensor
        value.detach().copy_(copied)
