"""Part ``copies``: bandwidth of copies between host and device, and within the device.

The keys of a row are ``num_bytes`` (size of the copy), ``copy_s`` (median over repetitions, each synchronized),
``bytes_per_s``, and ``forecast_bytes_per_s``. The last key is the bandwidth that forecasts assume for copies between
host and device; it is None for other copies. A copy within the device reads and writes each byte, but each byte is
counted only once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.parts import Rows, Setting, Values
from roomier.core.device.capability import capabilities_of
from roomier.core.device.streams import synchronize
from roomier.core.units import format_bytes
from roomier.planner.hardware.this_machine import this_machine

_NUM_BYTES = {"full": (2**20, 2**24, 2**28), "tiny": (2**16,)}
_NUM_REPETITIONS = 10
_KINDS = (
    "host to device, pinned",
    "host to device, unpinned",
    "device to host, pinned",
    "device to host, unpinned",
    "device to device",
)


def rows(setting: Setting) -> Rows:
    """Return a row for each direction and size."""
    return {
        f"{kind}, {format_bytes(num_bytes)}": partial(_row, kind, num_bytes, setting)
        for num_bytes in reversed(_NUM_BYTES[setting.size])
        for kind in _KINDS
    }


def summary(values: Mapping[str, Any]) -> str:
    """Return the bandwidth as text."""
    return f"{values['bytes_per_s'] / 1e9:.2f} GB/s"


def _row(kind: str, num_bytes: int, setting: Setting) -> Values:
    device = setting.device
    pins = kind.endswith(" pinned")
    if pins and not capabilities_of(device).has_pinned_memory:
        return {"unsupported": "the device does not support pinned host memory"}
    on_host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pins)
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    between = on_device.clone() if kind == "device to device" else on_host
    source, target = (between, on_device) if not kind.startswith("device to host") else (on_device, between)
    copy_s = _copy_s(source, target, device)
    has_link = device.type != "cpu" and kind != "device to device"
    return {
        "kind": kind,
        "num_bytes": num_bytes,
        "copy_s": copy_s,
        "bytes_per_s": num_bytes / copy_s,
        "forecast_bytes_per_s": _link_bytes_per_s(setting) if has_link else None,
    }


def _link_bytes_per_s(setting: Setting) -> float:
    return this_machine(1, accelerator=setting.accelerator).to_host.bytes_per_s


def _copy_s(source: Tensor, target: Tensor, device: torch.device) -> float:
    durations = []
    for _ in range(1 + _NUM_REPETITIONS):
        synchronize(device)
        start_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        durations.append(time.perf_counter() - start_s)
    return statistics.median(durations[1:])  # the first copy also loads kernels
