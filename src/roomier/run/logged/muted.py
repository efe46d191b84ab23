"""Context for a forward pass that runs only because other ranks require it, and that has no lasting effect."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from roomier.run.logged.results import Results

Undo = Callable[[], Any]

_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, str, bytes, type(None), tuple, frozenset)


@contextmanager
def muted(module: nn.Module, results: Results) -> Iterator[None]:
    """Undo all changes that a step makes to attributes and buffers of ``module`` and its submodules, and ignore logged
    values.

    These changes include items added to lists, changes to counters, and updates of metric states.
    """
    undo: list[Undo] = []
    for part in module.modules():
        _keep(part, undo)
    results.is_muted = True
    try:
        yield
    finally:
        results.is_muted = False
        for each in reversed(undo):
            each()


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
        copied = value.detach().clone()
        undo.append(lambda: value.detach().copy_(copied))
    elif isinstance(value, (list, deque)):
        items = list(value)

        def refill() -> None:
            value.clear()
            value.extend(items)

        undo.append(refill)
        for each in items:
            _keep_contents(each, undo)
    elif isinstance(value, (dict, set)):
        content = value.copy()

        def restore() -> None:
            value.clear()
            value.update(content)

        undo.append(restore)
        for each in content.values() if isinstance(content, dict) else ():
            _keep_contents(each, undo)
