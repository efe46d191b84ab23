"""Functions that return the processor, the cores and the available memory of the host."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil


def cpu_model() -> str:
    """Return the model name of the processor."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the number of cores that this process can use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def load() -> float:
    """Return the load average of the last minute; 0 if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def threads_of_rank(num_ranks: int) -> int:
    """Return the number of threads per process if ``num_ranks`` processes share the cores. ``OMP_NUM_THREADS``
    overrides this number."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(requested) if requested.isdigit() and int(requested) > 0 else max(1, num_cores() // num_ranks)


def total_memory_bytes() -> int:
    """Return the memory of the host in bytes, or the limit of the container if it is smaller."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in container_limits())])


def available_memory_bytes() -> int:
    """Return the number of bytes that processes can allocate without swapping, within the limit of the container."""
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in container_limits())]))


def container_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yield the memory limit and the memory usage, in bytes, of each control group (v2) that contains this process and
    has a limit.

    The usage excludes file pages that were not accessed recently (``inactive_file``), because the kernel reclaims them
    on demand (Linux, Documentation/admin-guide/cgroup-v2.rst).
    """
    try:
        lines = [line for line in own.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return
    group = root / lines[0].removeprefix("0::").lstrip("/") if lines else root
    # In a container, the control group of the container is often mounted as the root.
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
