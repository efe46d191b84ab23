"""Report of the kernels that computed attention in one forward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roomier.core import torch_private

# Operators to which torch dispatches scaled_dot_product_attention, with the names of the kernels.
_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math_for_mps": "mps",
    "aten::_scaled_dot_product_fused_attention_overrideable": "the device's own",
    "flex_attention": "flex",
}
_SOFTMAX_OF_MATH = "aten::_safe_softmax"  # the math kernel is not an operator, but it calls a specific softmax
_SOFTMAX = "aten::_softmax"


class AttentionCall(NamedTuple):
    """One call of attention.

    Attributes:
        kernel: name of the kernel, such as ``"flash"`` or ``"math"``; ``"by hand"`` if the code of the model computes
            and normalizes the scores.
        shape: shape of the queries, ``(B, H, T, K)``; for ``"math"`` and ``"by hand"``, shape of the scores,
            ``(B, H, T, T)``.
        dtype: dtype of the queries or scores.
    """

    kernel: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class AttentionReport:
    """Number of calls of each kernel in the forward pass of one micro-batch.

    Attributes:
        calls: number of calls by kernel, shape and dtype.
    """

    calls: Counter[AttentionCall] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Return one line for each combination of kernel, shape and dtype; an empty list if there is no attention."""
        lines = []
        for (kernel, shape, dtype), count in self.calls.items():
            sizes = "scores " if kernel in ("math", "by hand") else ""
            line = f"attention: {kernel}, {count} calls per forward pass, {sizes}{list(shape)}, {str(dtype)[6:]}"
            if kernel == "by hand":
                line += "; a Hugging Face model created with attn_implementation='sdpa' uses a kernel"
            lines.append(line)
        return lines


class AttentionWatch:
    """Context that records the attention calls of one forward pass. On exit without an error, it passes the report to
    ``tell``.

    Operations are slower in this context, so it is used for only one forward pass.

    Args:
        tell: function that receives the report.
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
        self._report.calls[AttentionCall(kernel, tuple(tensor.shape), tensor.dtype)] += 1


def _are_scores(tensor: Tensor, dim: int) -> bool:
    """Return True if the shape of ``tensor`` and ``dim`` are typical of a softmax over attention scores."""
    return tensor.ndim == 4 and dim % 4 == 3 and tensor.shape[-1] > 1
