"""Replacement of ``scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from roomier.core import torch_private

Attention = Callable[..., Tensor]

_OF_TORCH = F.scaled_dot_product_attention


@contextmanager
def replaced_attention(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Return a context in which ``replacement`` is called instead of ``scaled_dot_product_attention``.

    Both ways to call the function are covered: as an attribute of ``torch.nn.functional``, which torch's own modules
    use, and by a name that a module imported.

    Args:
        replacement: function that receives the function that it replaces, followed by the arguments of the call.
    """
    replaced, is_inside = F.scaled_dot_product_attention, False

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal is_inside
        if is_inside:  # the replacement calls the function that it replaces
            return replaced(*args, **kwargs)
        is_inside = True
        try:
            return replacement(replaced, *args, **kwargs)
        finally:
            is_inside = False

    F.scaled_dot_product_attention = attention
    try:
        with torch_private.replace_functions({_OF_TORCH: attention}):
            yield
    finally:
        F.scaled_dot_product_attention = replaced
