"""Capabilities of a device, such as streams, pinned memory and fused optimizers.

[Note: capabilities are tried]
Code must not depend on the name of a device, because torch supports devices for which roomier has no specific code, and
because drivers can implement torch's interfaces only partially. roomier therefore tries each feature once, with a tiny
operation, and stores the result until the process ends. The capabilities of the CPU are fixed: it is the host, so it
requires neither streams nor pinned memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from roomier.core.device.names import is_known_to_torch
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import PlanError
from roomier.core.log import notice

_FUSED: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
_DTYPES_OF_MODES = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "64-true": torch.float64,
}


@dataclass(frozen=True)
class Capabilities:
    """Features of one type of device. See [Note: capabilities are tried].

    Attributes:
        has_streams: True if kernels and copies can run on several streams, and events can order and time them.
        has_pinned_memory: True if host memory can be pinned, so copies from it do not block the host.
        has_memory_statistics: True if the allocator reports its current and peak memory usage.
        has_memory_info: True if the driver reports the free and the total memory.
        fused_optimizers: names of the optimizers (``"adam"``, ``"adamw"``, ``"sgd"``) that have fused kernels.
        dtypes: the dtypes among bfloat16, float16 and float64 in which the device can run computations.
    """

    has_streams: bool = False
    has_pinned_memory: bool = False
    has_memory_statistics: bool = False
    has_memory_info: bool = False
    fused_optimizers: frozenset[str] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset()

    @property
    def copies_asynchronously(self) -> bool:
        """True if copies between host and device can overlap with work on both."""
        return self.has_streams and self.has_pinned_memory


def capabilities_of(device: torch.device) -> Capabilities:
    """Return the capabilities of devices that have the same type as ``device``."""
    return _ON_CPU if device.type == "cpu" else _tried(device.type)


_ON_CPU = Capabilities(fused_optimizers=frozenset(_FUSED), dtypes=frozenset(_DTYPES_OF_MODES.values()))


@cache
def _tried(device_type: str) -> Capabilities:
    if not is_known_to_torch(device_type):
        return Capabilities()  # for example, the meta device
    device = torch.device(device_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver can warn about a feature that it emulates
        return Capabilities(
            has_streams=_works(lambda: _use_streams(device)),
            has_pinned_memory=_works(lambda: torch.empty(1, pin_memory=True).is_pinned()),
            has_memory_statistics=_works(lambda: _allocated_bytes(device) > 0),
            has_memory_info=_works(lambda: torch.accelerator.get_memory_info(device)[1] > 0),
            fused_optimizers=frozenset(name for name in _FUSED if _works(partial(_update_fused, name, device))),
            dtypes=frozenset(each for each in _DTYPES_OF_MODES.values() if _works(partial(_computes_in, each, device))),
        )


def _works(use: Callable[[], Any]) -> bool:
    """Call ``use``. Return False if the call raises an error or returns False, and True otherwise."""
    try:
        return use() is not False
    except torch.OutOfMemoryError:
        raise  # otherwise, a wrong result would be stored for the rest of the process
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError):
        return False


def _use_streams(device: torch.device) -> None:
    stream, event = torch.Stream(device), torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    stream.wait_event(event)
    with stream:
        pass


def _allocated_bytes(device: torch.device) -> int:
    held = torch.empty(1, device=device)
    found = torch.accelerator.memory_allocated(device)
    del held
    return found


def _update_fused(name: str, device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float32, device=device))
    parameter.grad = torch.ones_like(parameter)
    _FUSED[name]([parameter], lr=1e-3, fused=True).step()  # type: ignore[call-arg]


def _computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    module: Any = torch.get_device_module(device)
    if dtype is torch.bfloat16 and hasattr(module, "is_bf16_supported") and not module.is_bf16_supported():
        return False
    amp_dtypes = getattr(module, "get_amp_supported_dtype", lambda: _DTYPES_OF_MODES.values())()
    if dtype is not torch.float64 and dtype not in amp_dtypes:  # otherwise, torch would disable autocast with a warning
        return False
    torch.ones(1, dtype=dtype, device=device).add_(1)
    return True


def usable_device(accelerator: str, mode: str) -> torch.device:
    """Return the device for ``accelerator``, and print a notice if the device lacks capabilities.

    Args:
        mode: precision mode of the run.

    Raises:
        RoomierError: the machine does not have the accelerator, or the accelerator does not compute in the dtype of
        ``mode``.
    """
    device = resolve_device(accelerator)
    check_computes_in(mode, device)
    report_missing(device.type)
    return device


def check_computes_in(mode: str, device: torch.device) -> None:
    """Check that ``device`` computes in the dtype of a precision mode.

    Raises:
        PlanError: ``device`` does not compute in this dtype.
    """
    dtype = _DTYPES_OF_MODES.get(mode)
    dtypes = capabilities_of(device).dtypes
    if dtype is None or dtype in dtypes:
        return
    name = str(dtype).removeprefix("torch.")
    instead = "precision='16-mixed' or '32-true'" if torch.float16 in dtypes else "precision='32-true'"
    problem = f"is not supported on {device.type}, which does not compute in {name}"
    raise PlanError("precision", mode, problem, f"Use {instead}, or accelerator='cpu'")


@cache
def report_missing(device_type: str) -> None:
    """Print one notice about the capabilities that ``device_type`` lacks, and the slower paths that replace them."""
    if device_type == "cpu":
        return
    has = capabilities_of(torch.device(device_type))
    missing = []
    if not has.copies_asynchronously:
        feature = "streams" if has.has_pinned_memory else "pinned memory"
        missing.append(f"no {feature}, so copies between host and device do not overlap with computation")
    if not has.fused_optimizers:
        missing.append("no fused optimizers, so an update starts more kernels than with a fused optimizer")
    if not has.has_memory_statistics:
        missing.append("no memory statistics, so roomier finds peaks by counting the bytes of each operation")
    if missing:
        notice(f"{device_type} has {'; '.join(missing)}")
