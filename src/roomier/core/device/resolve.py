"""Resolve the name of an accelerator to a device.

torch supports one accelerator per process: the accelerator for which torch was compiled, or the device that a package
registered (``PrivateUse1``). ``torch.accelerator`` refers to this accelerator, so this file contains no code for
specific accelerators.
"""

from __future__ import annotations

from importlib import import_module

import torch
import torch.distributed as dist

from roomier.core.device.names import PACKAGES, is_known_to_torch
from roomier.core.errors import RoomierError


def resolve_device(accelerator: str) -> torch.device:
    """Return the device for ``accelerator``. The result has the current device index, unless it is the CPU.

    ``"gpu"`` and ``"auto"`` select the accelerator of this machine. If there is none, ``"auto"`` selects the CPU.

    Raises:
        RoomierError: this machine does not have the accelerator, or torch does not support it.
    """
    if accelerator not in ("auto", "gpu", "cpu"):
        _load_package(accelerator)
    present = accelerator_type()
    wanted = accelerator
    if accelerator in ("auto", "gpu"):
        wanted = present or ("cpu" if accelerator == "auto" else accelerator)
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted != present:
        raise RoomierError("accelerator", wanted, "is not available on this machine", f"Use one of: {_available()}")
    return torch.device(wanted, torch.accelerator.current_device_index())


def accelerator_type() -> str | None:
    """Return the device type of this machine's accelerator, such as ``"cuda"``; None if the machine has no
    accelerator."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def num_devices(device: torch.device) -> int:
    """Return the number of devices of this machine that have the type of ``device``; 1 for the CPU."""
    return 1 if device.type == "cpu" else torch.accelerator.device_count()


def device_name(device: torch.device) -> str | None:
    """Return the product name of ``device``; None if its driver does not report a name."""
    get_name = None if device.type == "cpu" else getattr(torch.get_device_module(device), "get_device_name", None)
    return None if get_name is None else str(get_name(device))


def group_backend(device_type: str) -> str | None:
    """Return the backend argument for a process group that communicates tensors on the CPU and on ``device_type``.

    The result is ``"gloo"`` for the CPU, and for example ``"cpu:gloo,cuda:nccl"`` for a GPU. The result is None if
    torch has no collectives for the device.
    """
    if device_type == "cpu":
        return "gloo"
    try:
        backend = dist.get_default_backend_for_device(device_type)
    except (ValueError, RuntimeError):  # torch raises a RuntimeError if it does not recognize the device type
        return None
    # torch lists gloo for mps, but gloo cannot send tensors on mps.
    is_supported = device_type in dist.Backend.backend_capability.get(backend, [device_type])
    return f"cpu:gloo,{device_type}:{backend}" if is_supported else None


def _available() -> str:
    present = accelerator_type()
    return ", ".join(map(repr, ["auto", *([] if present is None else [present]), "cpu"]))


def _load_package(device_type: str) -> None:
    """Import the package that registers ``device_type``, unless torch already supports the device."""
    package = PACKAGES.get(device_type)
    if package is None or is_known_to_torch(device_type):
        return
    name = package.replace("-", "_")
    try:
        import_module(name)
    except Exception as error:  # a missing driver can raise various errors
        action = f"Use one of: {_available()}"
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            problem = f"requires the package {package}, which is not installed"
            raise RoomierError("accelerator", device_type, problem, f"Run `pip install {package}`. {action}") from error
        problem = f"requires the package {package}, which cannot be imported: {' '.join(str(error).split())}"
        raise RoomierError("accelerator", device_type, problem, action) from error
