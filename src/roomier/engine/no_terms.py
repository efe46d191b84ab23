"""The backward of a micro-batch whose loss is a mean over nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def zero_gradients(loss: Tensor) -> Iterator[Tensor]:
    """A loss of 0 in the place of ``loss``, which is 0/0; inside, its backward gives gradients of zeros.

    That backward must run: other ranks wait for this one's gradients. Zero times the derivative of a division by zero
    is no number, so what each node of the graph receives is made zero again.
    """
    hooks = [node.register_prehook(_zeros) for node in _nodes_of(loss)]
    try:
        yield torch.nan_to_num(loss) * 0.0
    finally:
        for hook in hooks:  # the node that adds to a parameter's gradient outlives the graph
            hook.remove()


def _nodes_of(loss: Tensor) -> set[Any]:
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(each for each, _ in node.next_functions)
    return seen


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
