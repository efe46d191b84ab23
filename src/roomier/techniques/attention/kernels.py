"""Selection of the kernel for ``scaled_dot_product_attention``.

[Note: kernel selection]
By default, torch uses the fastest kernel that supports a call. If the user selects a kernel, only this kernel is
allowed. If it does not support a call (for example, flash attention with a mask on a GPU), torch raises an error and
states the reason only in warnings. roomier converts both to one error that contains the reason and the alternatives. A
kernel that is not available on the device is rejected when the run is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from roomier.core.errors import RoomierError
from roomier.plan.parts import AttentionPlan

MakeContext = Callable[[], AbstractContextManager[Any]]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_OF_DEVICE = {"cpu": ("flash", "math"), "mps": ("math",)}  # All kernels are available on other devices.
_NEEDS_16_BITS = ("flash", "cudnn")  # This applies to CUDA. Flash attention on the CPU also supports float32.
_NO_KERNEL = ("No available kernel", "No viable backend for scaled_dot_product_attention")
_SOURCE_OF_REASONS = "sdp_utils"  # torch issues the warnings that contain the reasons from source files with this name


def attention_context(plan: AttentionPlan, device: torch.device, compute_dtype: torch.dtype | None) -> MakeContext:
    """Return a function that creates a context in which attention uses the kernel of ``plan``.

    Forward passes, and backward passes that recompute activations, run in this context.

    Args:
        plan: selected kernel.
        device: device of the run.
        compute_dtype: dtype of matrix products; None means float32.

    Raises:
        RoomierError: the kernel is not available on ``device``, or does not support ``compute_dtype``.
    """
    if plan.kernel == "auto":
        return nullcontext
    _check_exists(plan.kernel, device, compute_dtype)
    return _Only(plan.kernel)


def _check_exists(kernel: str, device: torch.device, compute_dtype: torch.dtype | None) -> None:
    available = _OF_DEVICE.get(device.type, tuple(_BACKENDS))
    if kernel not in available:
        instead = " or ".join(repr(each) for each in reversed(available))
        problem = f"is not available on {device.type}"
        raise RoomierError("attention", kernel, problem, f"Use 'auto', which selects the fastest kernel, or {instead}")
    is_16_bit = compute_dtype in (torch.float16, torch.bfloat16)
    if device.type == "cuda" and kernel in _NEEDS_16_BITS and not is_16_bit:
        problem = f"requires 16-bit precision, but the run computes in {compute_dtype or torch.float32}"
        action = "Use precision='bf16-mixed', or attention='efficient', which supports float32"
        raise RoomierError("attention", kernel, problem, action)


class _Only:
    """Function that creates a context in which only ``kernel`` can compute attention."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel
        self._has_run = False

    def __call__(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(_BACKENDS[self._kernel]) if self._has_run else self._first()

    @contextmanager
    def _first(self) -> Iterator[None]:
        with _reasons() as reasons:
            try:
                with sdpa_kernel(_BACKENDS[self._kernel]):
                    yield
            except RuntimeError as error:
                if not any(each in str(error) for each in _NO_KERNEL):
                    raise
                problem = "cannot compute the attention of this model: "
                problem += "; ".join(dict.fromkeys(reasons)) or "torch reports no reason"
                action = "Use attention='auto', which selects the fastest supported kernel, or 'math', which supports "
                raise RoomierError("attention", self._kernel, problem, f"{action}every call") from error
        # False after an evaluation, because training can use dropout and can therefore still fail.
        self._has_run = torch.is_grad_enabled()


@contextmanager
def _reasons() -> Iterator[list[str]]:
    """Collect torch's reasons why a kernel cannot be used. Other warnings are shown as usual."""
    reasons: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f"(?s).*{_SOURCE_OF_REASONS}")
        show = warnings.showwarning

        def keep(message: Warning | str, *place: Any, **more: Any) -> None:
            text = str(message)
            if _SOURCE_OF_REASONS not in text:
                show(message, *place, **more)
            elif not (reason := text.partition("(Triggered internally")[0].strip()).endswith("because:"):
                reasons.append(reason.rstrip("."))

        warnings.showwarning = keep
        yield reasons
