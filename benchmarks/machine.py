"""Description of a measurement: machine, versions, commit and command. Every result contains this description."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

import roomier
from roomier.core.device.resolve import accelerator_type, device_name
from roomier.planner.hardware.host import cpu_model, num_cores

PROC = Path("/proc/self")  # only on Linux
_PACKAGE = Path(roomier.__file__).parent


def circumstances() -> dict[str, Any]:
    """Return machine, versions, commit and command of this process as JSON data."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "roomier": roomier.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **commit(),
        "machine": {
            "cpu": cpu_model(),
            "num_cores": num_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": round(os.getloadavg()[0], 2),
            "devices": _device_names(),
            "system": platform.platform(terse=True),
        },
    }


def _device_names() -> list[str]:
    kind = accelerator_type()
    devices = [] if kind is None else [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    return [device_name(device) or device.type for device in devices]


def commit() -> dict[str, Any]:
    """Return the commit of this checkout, and whether the package or the benchmarks differ from this commit.

    Both values are None if the package is not in a git checkout, for example if a wheel is installed.
    """
    unknown = {"commit": None, "has_uncommitted_changes": None}
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return unknown
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".", ":(top)benchmarks/*.py")
    return unknown if head is None or changes is None else {"commit": head, "has_uncommitted_changes": bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def resident_bytes(name: str = "VmHWM") -> int:
    """Return a value of the resident set of this process on Linux, by default its peak."""
    return int(dict(line.split(":", 1) for line in (PROC / "status").read_text().splitlines())[name].split()[0]) * 1024


def restart_peak() -> None:
    """Set the peak of :func:`resident_bytes` to the current value."""
    (PROC / "clear_refs").write_text("5")
