"""The device ``simulated``. ``register`` adds the device to the process until the process ends.

The other functions control the simulation and report what the program did. ``docs/design/simulator.md`` describes the
model. The environment variable ``SIMULATED_WITHOUT`` names capabilities to remove, separated by commas.

Example::

    simulated.register()
    simulated.set_schedule(simulated.Schedule.LATE)
    with simulated.forbidden_host_waits():
        train_step()
    assert simulated.races() == []
"""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.simulator import device_module
from tests.simulator.build import NAME, build

DEVICE = device_module.NAME
BACKEND = "simulated_ccl"
BACKENDS = f"cpu:gloo,{DEVICE}:{BACKEND}"
CAPABILITIES = ("streams", "pinned_memory", "fused_optimizers", "memory_statistics", "bfloat16")
DEFAULT_MEMORY_LIMIT = 8 * 2**30

_extension: Any = None


class Schedule(enum.IntEnum):
    """Order in which queued tasks run.

    Attributes:
        LATE: a task runs when the host waits for it or for a task that depends on it.
        OTHERS_FIRST: when the host waits for a stream, all tasks of the other streams run first.
        IMMEDIATE: a task runs when it is enqueued.
    """

    LATE = 0
    OTHERS_FIRST = 1
    IMMEDIATE = 2


def register() -> None:
    """Compile the simulator if necessary, and register the device, its module ``torch.simulated`` and its backend.

    Raises:
        RuntimeError: the simulator cannot be compiled.
    """
    global _extension
    _extension = device_module.extension = _load()
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, device_module)
    sys.modules[f"torch.{DEVICE}"] = device_module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, _create_backend, devices=[DEVICE])
    for name in filter(None, os.environ.get("SIMULATED_WITHOUT", "").split(",")):
        remove_capability(name)


def set_schedule(schedule: Schedule) -> None:
    """Set the schedule of all streams. Queued tasks run before."""
    _extension.set_schedule(int(schedule))


def races() -> list[str]:
    """Return the conflicting accesses that no wait orders, at most 1000."""
    found: list[str] = _extension.races()
    return found


def host_waits() -> dict[str, int]:
    """Return the number of waits of the host for the device, by kind."""
    found: dict[str, int] = _extension.host_waits()
    return found


@contextlib.contextmanager
def forbidden_host_waits(*, explicit: bool = True) -> Iterator[None]:
    """Raise a RuntimeError if the host waits for the device within the context.

    Args:
        explicit: True to also forbid the synchronization of a stream, an event or the device.
    """
    _extension.set_forbidden(2 if explicit else 1)
    try:
        yield
    finally:
        _extension.set_forbidden(0)


@contextlib.contextmanager
def allowed_host_waits() -> Iterator[None]:
    """Neither count nor forbid waits of the current thread within the context. Use this context for documented
    waits."""
    _extension.exempt_this_thread(True)
    try:
        yield
    finally:
        _extension.exempt_this_thread(False)


def num_tasks() -> int:
    """Return the number of tasks that were enqueued."""
    count: int = _extension.num_tasks()
    return count


def run_all() -> None:
    """Run all queued tasks without counting a wait."""
    _extension.run_all()


def clear() -> None:
    """Run all queued tasks, and clear races, waits and the number of tasks."""
    _extension.run_all()
    _extension.clear_counts()


def reset() -> None:
    """Restore the defaults: schedule, memory limit and counts."""
    set_schedule(Schedule.LATE)
    set_memory_limit(DEFAULT_MEMORY_LIMIT)
    clear()


def set_memory_limit(num_bytes: int) -> None:
    """Set the capacity of each device in bytes."""
    _extension.set_memory_limit(num_bytes)


def set_device_count(count: int) -> None:
    """Set the number of devices of this process. Call this function before the first backward pass, which starts the
    threads of the devices."""
    _extension.set_device_count(count)


def remove_capability(name: str) -> None:
    """Remove a capability of ``CAPABILITIES`` in this process."""
    if name not in CAPABILITIES:
        raise ValueError(f"{name} is not a capability: {', '.join(CAPABILITIES)}")
    if name == "bfloat16":
        device_module.has_bfloat16 = False
    else:
        _extension.remove_capability(name)


def _load() -> Any:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(build()))
    spec = importlib.util.spec_from_file_location(NAME, loader.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _create_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    return _extension.make_backend(gloo)
