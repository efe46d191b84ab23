"""Which device a name means here."""

import torch

from roomier.core.errors import RoomierError


def resolve_device(accelerator: str) -> torch.device:
    """The device for ``accelerator``: ``"auto"`` takes CUDA, then MPS, then CPU.

    Raises:
        RoomierError: the accelerator is named and this machine has none.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if accelerator == "auto":
        accelerator = next(name for name, here in available.items() if here)
    accelerator = {"gpu": "mps" if available["mps"] else "cuda"}.get(accelerator, accelerator)
    if not available.get(accelerator, False):
        here = ", ".join(repr(name) for name, present in available.items() if present)
        raise RoomierError("accelerator", accelerator, "this machine has none", f"Use one of: 'auto', {here}")
    if accelerator == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(accelerator)
