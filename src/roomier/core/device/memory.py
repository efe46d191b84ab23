"""Memory of an accelerator. All sizes are in bytes.

Functions that read statistics of the allocator require the capability ``has_memory_statistics``. *Allocated* memory is
the memory of tensors. The size of each tensor is rounded up to the block size of the allocator. *Reserved* memory is
the memory that the allocator has obtained from the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roomier.core.device.capability import capabilities_of


def allocated_bytes(device: torch.device) -> int:
    """Return the number of bytes that tensors currently occupy."""
    return torch.accelerator.memory_allocated(device)


def peak_allocated_bytes(device: torch.device) -> int:
    """Return the maximum of :func:`allocated_bytes` since :func:`reset_peaks`."""
    return torch.accelerator.max_memory_allocated(device)


def reserved_bytes(device: torch.device) -> int:
    """Return the number of bytes that the allocator has reserved on the device."""
    return torch.accelerator.memory_reserved(device)


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the maximum of :func:`reserved_bytes` since :func:`reset_peaks`."""
    return torch.accelerator.max_memory_reserved(device)


def reset_peaks(device: torch.device) -> None:
    """Reset the peaks of :func:`peak_allocated_bytes` and :func:`peak_reserved_bytes` to the current values."""
    torch.accelerator.reset_peak_memory_stats(device)


def free_and_total_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return the free and the total memory of ``device``, or None if the driver does not report them. Memory that other
    processes use does not count as free."""
    return torch.accelerator.get_memory_info(device) if capabilities_of(device).has_memory_info else None


def available_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that this process can still allocate, including cached memory; None if this number is
    unknown."""
    info = free_and_total_bytes(device)
    if info is None or not capabilities_of(device).has_memory_statistics:
        return None
    return info[0] + reserved_bytes(device) - allocated_bytes(device)


def total_bytes(device: torch.device) -> int | None:
    """Return the total memory of ``device``; None if its driver does not report it."""
    module: Any = torch.get_device_module(device)
    if hasattr(module, "recommended_max_memory"):  # Apple's GPUs share the memory of the host
        return int(module.recommended_max_memory())
    if hasattr(module, "get_device_properties"):
        # get_memory_info returns the same total, but creates a context of 400 MiB on CUDA (unslothai/unsloth-zoo#1053).
        found = getattr(module.get_device_properties(device), "total_memory", None)
        if found is not None:
            return int(found)
    info = free_and_total_bytes(device)
    return None if info is None else info[1]


def release_cached(device: torch.device) -> None:
    """Release the unused memory in the allocator's cache to the device."""
    release = None if device.type == "cpu" else getattr(torch.get_device_module(device), "empty_cache", None)
    if release is not None:
        release()


def statistics(device: torch.device) -> Mapping[str, Any]:
    """Return all statistics of the allocator; an empty mapping if the allocator reports no statistics."""
    if not capabilities_of(device).has_memory_statistics:
        return {}
    module: Any = torch.get_device_module(device)
    found: Mapping[str, Any] = getattr(module, "memory_stats", torch.accelerator.memory_stats)(device)
    return found
