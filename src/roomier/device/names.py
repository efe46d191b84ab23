"""Names of device types. This file does not import torch, so that a Plan can be checked without torch."""

from __future__ import annotations

PACKAGES = {"npu": "torch-npu", "tpu": "torch-tpu"}
"""Packages that add a device type to torch when they are imported."""

_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "tpu": "TPU_VISIBLE_CHIPS",
    "xpu": "ZE_AFFINITY_MASK",
}


def accelerator_of_torch() -> str | None:
    """Return the type of the accelerator of this build of torch, even if this machine has none. None for the CPU."""
    import torch

    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def is_known_to_torch(device_type: str) -> bool:
    """Return whether ``device_type`` is the accelerator of this build of torch, even if this machine has none."""
    return accelerator_of_torch() == device_type


def visible_devices_variable(device_type: str) -> str:
    """Return the environment variable that selects the devices of a process."""
    return _VISIBLE.get(device_type, f"{device_type.upper()}_VISIBLE_DEVICES")
