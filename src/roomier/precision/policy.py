"""A precision mode as the few things the engine does differently for it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roomier.core import torch_fake
from roomier.core.errors import PlanError
from roomier.core.tree import map_tensors


@dataclass(frozen=True)
class Precision:
    """One mode on one device.

    Attributes:
        weight_dtype: what floating-point weights and inputs are converted to; None leaves them.
        autocast_dtype: what autocast computes matrix products in; None for no autocast.
        scales_loss: gradients of 16-bit floats underflow without a loss scale.
    """

    device: torch.device
    weight_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    scales_loss: bool = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.weight_dtype is None or torch_fake.makes_fake_tensors():
            return module  # a dry run copies weights in this dtype: fake ones cannot be swapped
        return module.to(self.weight_dtype)

    def convert_batch(self, batch: Any) -> Any:
        """``batch`` with its floating-point tensors in the dtype of the weights."""
        dtype = self.weight_dtype
        if dtype is None:
            return batch
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)

    def forward_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """What makes the context a step runs in; one object a call, cheap where nothing is to be done."""
        if self.autocast_dtype is not None:
            device_type, dtype = self.device.type, self.autocast_dtype
            return lambda: torch.autocast(device_type, dtype=dtype)
        if self.weight_dtype is not None:
            dtype = self.weight_dtype
            return lambda: default_dtype(dtype)
        return nullcontext


def precision_of(mode: str, device: torch.device) -> Precision:
    """The :class:`Precision` for a mode the Plan has checked.

    Raises:
        PlanError: the device, which the Plan may have left open, has no such numbers.
    """
    if mode == "64-true" and device.type == "mps":
        action = "Use accelerator='cpu', or '32-true'"
        raise PlanError("precision", mode, "the device is mps, which has no float64", action)
    match mode:
        case "32-true":
            return Precision(device)
        case "64-true":
            return Precision(device, weight_dtype=torch.float64)
        case "bf16-true":
            return Precision(device, weight_dtype=torch.bfloat16)
        case "bf16-mixed":
            return Precision(device, autocast_dtype=torch.bfloat16)
        case "16-mixed":
            return Precision(device, autocast_dtype=torch.float16, scales_loss=True)
        case _:
            raise AssertionError(f"the Plan let precision mode {mode!r} through")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have ``dtype`` inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def set_matmul_precision(level: str) -> None:
    """fp32 matrix products run in ``"highest"`` (fp32), ``"high"`` (tf32) or ``"medium"`` (bf16) from here on.

    cuDNN's convolutions go along: torch lets them use tf32 by default, whatever was asked of matrix products.
    """
    torch.set_float32_matmul_precision(level)
    torch.backends.cudnn.allow_tf32 = level != "highest"


@contextmanager
def matmul_precision(level: str) -> Iterator[None]:
    """:func:`set_matmul_precision` inside; these are settings of the process, so they are put back as they were."""
    before, convolutions_before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions_before
