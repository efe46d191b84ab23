"""Backward pass of a micro-batch whose loss averages over no terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from roomier.core.tree import nodes_of


@contextmanager
def zero_gradients(loss: Tensor) -> Iterator[Tensor]:
    """Yield a zero loss in place of ``loss``, which is 0/0. Inside the context, the backward pass of the zero loss
    computes zero gradients.

    The backward pass must run, because other ranks wait for the gradients of this rank. Zero times the derivative of
    0/0 is NaN, so the gradient that enters each node of the graph is set to zero.

    Args:
        loss: the loss (0-dim) with its graph.
    """
    hooks = [node.register_prehook(_zeros) for node in nodes_of(loss)]
    try:
        yield torch.nan_to_num(loss) * 0.0
    finally:
        for hook in hooks:  # the nodes that accumulate gradients in parameters outlive the graph
            hook.remove()


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
