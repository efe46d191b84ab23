"""Which kernel computed attention, seen in one forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roomier.core import torch_private

# What torch dispatches to where scaled_dot_product_attention is called, with the kernel it is.
_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math_for_mps": "math",
    "aten::_scaled_dot_product_fused_attention_overrideable": "the device's own",
    "flex_attention": "flex",
}
_SOFTMAX_OF_MATH = "aten::_safe_softmax"  # the math kernel is no operator, but has a softmax of its own
_SOFTMAX = "aten::_softmax"


class Call(NamedTuple):
    """One call of attention.

    Attributes:
        kernel: ``"flash"``, ``"efficient"``, ``"cudnn"``, ``"math"``, or ``"by hand"`` where the model multiplies and
            normalises scores itself.
        shape: ``[B, H, T, K]`` of the queries; of ``"math"`` and ``"by hand"`` that of the scores, ``[B, H, T, T]``.
    """

    kernel: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class AttentionReport:
    """How often each kernel computed which attention in the forward of one micro-batch."""

    calls: Counter[Call] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """One for each kernel and shape; none where no attention was seen."""
        lines = []
        for (kernel, shape, dtype), count in self.calls.items():
            sizes = "scores " if kernel in ("math", "by hand") else ""
            line = f"attention: {kernel}, {count} calls a forward, {sizes}{list(shape)}, {str(dtype)[6:]}"
            if kernel == "by hand":
                line += "; a Hugging Face model built with attn_implementation='sdpa' takes a kernel"
            lines.append(line)
        return lines


class AttentionWatch:
    """A context in which one forward is watched; then ``tell`` is called with what was seen.

    The operations are slower inside, so it is not entered again.
    """

    def __init__(self, tell: Callable[[AttentionReport], Any]) -> None:
        self._tell = tell
        self._report = AttentionReport()
        self._interception = torch_private.intercept(self._on_operation, lets_compile=True)

    def __enter__(self) -> AttentionWatch:
        self._interception.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._interception.__exit__(kind, error, trace)
        if kind is None:
            self._tell(self._report)

    def _on_operation(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = func.name().partition(".")[0]
        if name in _OPERATORS:
            self._note(_OPERATORS[name], args[0])
        elif name == _SOFTMAX_OF_MATH:
            self._note("math", args[0])
        elif name == _SOFTMAX and _are_scores(args[0], args[1]):
            self._note("by hand", args[0])
        return func(*args, **kwargs)

    def _note(self, kernel: str, tensor: Tensor) -> None:
        self._report.calls[Call(kernel, tuple(tensor.shape), tensor.dtype)] += 1


def _are_scores(tensor: Tensor, dim: int) -> bool:
    """Of each query for each key, by heads."""
    return tensor.ndim == 4 and dim % 4 == 3 and tensor.shape[-1] > 1
