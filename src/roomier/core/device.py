"""Resolve the name of an accelerator to a device."""

import torch

from roomier.core.errors import RoomierError


def resolve_device(accelerator: str) -> torch.device:
    """Return the device for ``accelerator``. ``"auto"`` selects CUDA if available, then MPS, then the CPU.

    Raises:
        RoomierError: this machine does not have the accelerator.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "auto":
        accelerator = next(name for name, here in available.items() if here)
    accelerator = {"gpu": "mps" if available["mps"] else "cuda"}.get(accelerator, accelerator)
    if not available.get(accelerator, False):
        here = ", ".join(repr(name) for name, present in available.items() if present)
        raise RoomierError(
            "accelerator", accelerator, "is not available on this machine", f"Use one of: 'auto', {here}"
        )
    if accelerator == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(accelerator)
