"""Precision modes: dtypes of weights and computation on a device."""

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
    """Precision mode of a run on a device.

    Attributes:
        device: the device of this rank.
        weight_dtype: dtype of floating-point weights and inputs; None if they are not converted.
        autocast_dtype: dtype of matmuls under autocast; None if autocast is disabled.
        scales_loss: whether the loss is scaled to prevent underflow of float16 gradients.
    """

    device: torch.device
    weight_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    scales_loss: bool = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the weights and buffers of ``module`` to ``weight_dtype``, in place."""
        if self.weight_dtype is None or torch_fake.makes_fake_tensors():
            return module  # a dry run creates weights directly in this dtype, because fake tensors cannot be swapped
        return module.to(self.weight_dtype)

    def convert_batch(self, batch: Any) -> Any:
        """Return ``batch`` with its floating-point tensors converted to the dtype of the weights."""
        dtype = self.weight_dtype
        if dtype is None:
            return batch
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)

    def forward_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return a function that creates the context in which a forward pass runs."""
        if self.autocast_dtype is not None:
            device_type, dtype = self.device.type, self.autocast_dtype
            return lambda: torch.autocast(device_type, dtype=dtype)
        if self.weight_dtype is not None:
            dtype = self.weight_dtype
            return lambda: default_dtype(dtype)
        return nullcontext


_MODES: dict[str, dict[str, Any]] = {
    "32-true": {},
    "64-true": {"weight_dtype": torch.float64},
    "bf16-true": {"weight_dtype": torch.bfloat16},
    "bf16-mixed": {"autocast_dtype": torch.bfloat16},
    "16-mixed": {"autocast_dtype": torch.float16, "scales_loss": True},
}


def precision_of(mode: str, device: torch.device) -> Precision:
    """Return the :class:`Precision` for ``mode`` on ``device``.

    Args:
        mode: a mode that the Plan accepts, such as ``"bf16-mixed"``.
        device: the device of this rank.

    Raises:
        PlanError: the device does not support the mode.
    """
    if mode == "64-true" and device.type == "mps":
        action = "Use accelerator='cpu', or precision='32-true'"
        raise PlanError("precision", mode, "is not supported on mps, which has no float64", action)
    return Precision(device, **_MODES[mode])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Return a context in which new floating-point tensors have the dtype ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def set_matmul_precision(level: str) -> None:
    """Set the precision of fp32 matmuls: ``"highest"`` (fp32), ``"high"`` (tf32) or ``"medium"`` (bf16).

    Only ``"highest"`` disables tf32 in cuDNN convolutions. By default, torch enables tf32 in these convolutions.
    """
    torch.set_float32_matmul_precision(level)
    torch.backends.cudnn.allow_tf32 = level != "highest"


@contextmanager
def matmul_precision(level: str) -> Iterator[None]:
    """Return a context that calls :func:`set_matmul_precision` and restores the previous settings on exit."""
    before, convolutions_before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions_before
