"""Names of device types. Importing this file does not import torch, so a Plan can be checked without torch."""

from __future__ import annotations

PACKAGES = {"npu": "torch-npu", "tpu": "torch-tpu"}
"""The package for each device type that torch supports only after the package is imported."""

_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "tpu": "TPU_VISIBLE_CHIPS",
    "xpu": "ZE_AFFINITY_MASK",
}


def accelerator_of_torch() -> str | None:
    """Return the type of accelerator that this build of torch supports, even if this machine has none; None for a CPU
    build."""
    import torch

    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def is_known_to_torch(device_type: str) -> bool:
    """Return whether this build of torch supports accelerators of ``device_type``, even if this machine has none."""
    return accelerator_of_torch() == device_type


def visible_devices_variable(device_type: str) -> str:
    """Return the name of the environment variable that selects the devices that a process can use."""
    return _VISIBLE.get(device_type, f"{device_type.upper()}_VISIBLE_DEVICES")
