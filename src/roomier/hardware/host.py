"""What the host is: its processor, its cores, and the memory that a run may have."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil


def host_name() -> str:
    return socket.gethostname()


def cpu_model() -> str:
    """The name the processor gives itself."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def load() -> float:
    """How many cores were busy or asked for, on average over the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def threads_of_rank(num_ranks: int) -> int:
    """Threads of each of ``num_ranks`` processes that share the cores, unless the environment says otherwise."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(told) if told.isdigit() and int(told) > 0 else max(1, num_cores() // num_ranks)


def total_memory_bytes() -> int:
    """Of the host, or of the container this process runs in where that has less."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in container_limits())])


def available_memory_bytes() -> int:
    """What processes can still take without swapping, within the container's limit."""
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in container_limits())]))


def container_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, int]]:
    """Limit and use of this process's control group (v2) and of each above it that has a limit.

    Of what a group uses, file pages that were not touched lately (``inactive_file``) are given back when needed:
    Linux, Documentation/admin-guide/cgroup-v2.rst.
    """
    try:
        lines = [line for line in own.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return
    group = root / lines[0].removeprefix("0::").lstrip("/") if lines else root
    # Inside a container its own group is often mounted as the root.
    for folder in dict.fromkeys([group, *group.parents, root]):
        if root not in (folder, *folder.parents):
            continue
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            yield int(limit), max(0, used - int(statistics.get("inactive_file", 0)))
