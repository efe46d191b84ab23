"""What is known about the device a run computes on."""

import re

import torch

from roomier.core.errors import RoomierError

# Dense peak rates in FLOP/s, from the vendors' data sheets (without structured sparsity; 16-bit with fp32
# accumulation): NVIDIA H100/H200 (SXM), A100, A10, L4, L40S, V100, T4, B200 data sheets; GeForce: Ada and Ampere
# architecture white papers.
_PEAK_FLOPS_PER_S: list[tuple[str, dict[str, float]]] = [
    ("B200", {"16": 2250e12, "tf32": 1120e12, "32": 75e12}),
    ("H200", {"16": 989e12, "tf32": 494e12, "32": 67e12}),
    ("H100 PCIe", {"16": 756e12, "tf32": 378e12, "32": 51e12}),
    ("H100", {"16": 989e12, "tf32": 494e12, "32": 67e12}),
    ("A100", {"16": 312e12, "tf32": 156e12, "32": 19.5e12}),
    ("L40S", {"16": 362e12, "tf32": 183e12, "32": 91.6e12}),
    ("L4", {"16": 121e12, "tf32": 60e12, "32": 30.3e12}),
    ("A10", {"16": 125e12, "tf32": 62.5e12, "32": 31.2e12}),
    ("V100", {"16": 125e12, "32": 15.7e12}),
    ("T4", {"16": 65e12, "32": 8.1e12}),
    ("RTX 4090", {"16": 165.2e12, "tf32": 82.6e12, "32": 82.6e12}),
    ("RTX 3090", {"16": 71e12, "tf32": 35.6e12, "32": 35.6e12}),
]


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


def peak_flops_per_s(device: torch.device, precision: str) -> float | None:
    """Peak rate of matrix products in FLOP/s for ``precision`` (``"16"``, ``"tf32"`` or ``"32"``).

    Returns None where the device is not in the table; a CPU never is, its peak depends on clocks under load.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # Whole words: an L40 is no L4, an A10G no A10.
    found = (rates for key, rates in _PEAK_FLOPS_PER_S if re.search(rf"\b{key}\b", name))
    return next(found, {}).get(precision)
