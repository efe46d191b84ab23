"""What a figure stands on: machine, versions, commit, command. Every result carries it."""

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
from roomier.hardware.host import cpu_model, num_cores

_PACKAGE = Path(roomier.__file__).parent


def circumstances(command: list[str] | None = None) -> dict[str, Any]:
    """Machine, versions, commit and command, as plain data.

    Args:
        command: the words that started the measurement; by default those of this process.
    """
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command or [Path(sys.argv[0]).name, *sys.argv[1:]]),
        "roomier": roomier.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **commit(),
        "machine": {
            "cpu": cpu_model(),
            "num_cores": num_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": round(os.getloadavg()[0], 2),
            "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "system": platform.platform(terse=True),
        },
    }


def commit() -> dict[str, Any]:
    """The commit this package is checked out at and whether files differ from it; None and None where git does not
    keep it (an installed wheel, say)."""
    unknown = {"commit": None, "has_uncommitted_changes": None}
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return unknown
    head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    return unknown if head is None or changes is None else {"commit": head, "has_uncommitted_changes": bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
