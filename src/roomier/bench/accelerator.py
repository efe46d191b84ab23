"""Calls of the benchmarks to a device: the CPU, or an accelerator that ``torch.accelerator`` supports."""

from __future__ import annotations

import gc
from contextlib import suppress

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.device import resolve_device
from roomier.hardware.host import cpu_model


def device_of(accelerator: str) -> torch.device:
    """Return the current device of ``accelerator``, a value of ``Trainer(accelerator=...)``.

    Raises:
        RoomierError: the accelerator is not available.
    """
    return resolve_device(accelerator)


def device_of_rank(accelerator: str, local_rank: int) -> torch.device:
    """Make the device of ``local_rank`` the current device of this process, and return it."""
    device = resolve_device(accelerator)
    if device.type != "cpu" and num_devices(device) > 1:
        torch.accelerator.set_device_index(local_rank)
    return resolve_device(accelerator)


def device_name(device: torch.device) -> str:
    """Return the name of the device, such as ``"NVIDIA H100 80GB HBM3"``, or the model name of the processor."""
    if device.type == "cpu":
        return cpu_model()
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))


def num_devices(device: torch.device) -> int:
    """Return the number of devices of this type that this process can use. The CPU is one device."""
    return 1 if device.type == "cpu" else torch.accelerator.device_count()


def group_backend(device: torch.device) -> str:
    """Return the backend of a process group for tensors on the host and on ``device``."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has completed all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def free_unused(device: torch.device) -> None:
    """Delete unreachable objects, and return unused memory of the allocator to ``device``."""
    gc.collect()
    release = None if device.type == "cpu" else getattr(torch.get_device_module(device), "empty_cache", None)
    if release is not None:
        release()


def allocated_bytes(device: torch.device) -> int | None:
    """Return the bytes that tensors on ``device`` occupy; None if its allocator does not report them."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # the allocator has no statistics
            return torch.accelerator.memory_allocated(device)
    return None


def available_bytes(device: torch.device) -> int:
    """Return the free memory of ``device``, or the available memory of the host if the driver does not report it."""
    if device.type != "cpu":
        with suppress(RuntimeError):  # the driver does not report the free memory
            return int(torch.accelerator.get_memory_info(device)[0])
    return int(psutil.virtual_memory().available)


def pinned(num_bytes: int) -> Tensor | None:
    """Return ``num_bytes`` of pinned host memory; None if no accelerator of this process supports it."""
    try:
        return torch.ones(num_bytes, dtype=torch.uint8).pin_memory()
    except RuntimeError:
        return None
