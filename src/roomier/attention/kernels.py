"""The kernel of ``scaled_dot_product_attention``, chosen by name.

[Note: a kernel by name]
torch takes the fastest kernel that can compute a call; a name leaves it that one alone. Where it cannot compute a call
(flash attention with a mask on a GPU, say), torch stops there and warns of the reason. This becomes one error that
names the reason and the kernel to use. What no call could ever have is refused when the run is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Never

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
_OF_DEVICE = {"cpu": ("flash", "math"), "mps": ("math",)}  # others have all
_NEEDS_16_BITS = ("flash", "cudnn")  # on CUDA; the CPU's flash attention computes in float32 too
_NO_KERNEL = ("No available kernel", "No viable backend for scaled_dot_product_attention")
_SOURCE_OF_REASONS = "sdp_utils"  # torch warns of them from files of this name


def attention_context(plan: AttentionPlan, device: torch.device, compute_dtype: torch.dtype | None) -> MakeContext:
    """What makes the context in which attention takes the kernel of ``plan``. A forward runs in it, and a backward too,
    where blocks are computed again.

    Args:
        compute_dtype: of matrix products; None is float32.

    Raises:
        RoomierError: ``device`` has no such kernel, or not in that dtype.
    """
    if plan.kernel == "auto":
        return nullcontext
    _check_exists(plan.kernel, device, compute_dtype)
    return _Only(plan.kernel)


def _check_exists(kernel: str, device: torch.device, compute_dtype: torch.dtype | None) -> None:
    there = _OF_DEVICE.get(device.type, tuple(_BACKENDS))
    if kernel not in there:
        instead = " or ".join(repr(each) for each in reversed(there))
        raise RoomierError(
            "attention",
            kernel,
            f"does not exist on {device.type}",
            f"Use 'auto', which takes the fastest, or {instead}",
        )
    is_16_bit = compute_dtype in (torch.float16, torch.bfloat16)
    if device.type == "cuda" and kernel in _NEEDS_16_BITS and not is_16_bit:
        raise RoomierError(
            "attention",
            kernel,
            f"computes in 16 bits, not in {compute_dtype or torch.float32}",
            "Use precision='bf16-mixed', or attention='efficient', which computes in float32",
        )


class _Only:
    """Makes the context in which ``kernel`` alone may compute attention."""

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
                if any(each in str(error) for each in _NO_KERNEL):
                    self._refuse(reasons, error)
                raise
        self._has_run = torch.is_grad_enabled()  # an evaluation, without dropout, says nothing of the training

    def _refuse(self, reasons: list[str], error: RuntimeError) -> Never:
        why = "; ".join(dict.fromkeys(reasons)) or "torch gives no reason"
        raise RoomierError(
            "attention",
            self._kernel,
            f"cannot compute the attention of this model: {why}",
            "Use attention='auto', which takes the fastest kernel that can, or 'math', which computes all",
        ) from error


@contextmanager
def _reasons() -> Iterator[list[str]]:
    """Why torch leaves out kernels inside; other warnings go on as ever."""
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
