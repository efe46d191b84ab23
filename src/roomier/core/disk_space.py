"""Free space of a file system, and the reason why a write failed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from roomier.core.units import format_bytes

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that mean that data does not fit."""


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that a user without privileges can still store on the file system of ``folder``."""
    system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def shortage(folder: Path, needed_bytes: int, number: int = errno.ENOSPC, reclaimed_bytes: int = 0) -> str:
    """Return the end of a sentence that states how much space a write needs, and how much is available.

    Args:
        number: number of the error.
        reclaimed_bytes: size of the files that are removed after the failure, which counts as free space.
    """
    needed = f"requires {format_bytes(needed_bytes)}, but"
    if number == errno.EFBIG:
        import resource  # late import: does not exist on Windows

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit == resource.RLIM_INFINITY:
            return f"{needed} the file system of {folder} does not support files of this size"
        return f"{needed} a file of this process may have at most {format_bytes(limit)}; raise this limit (`ulimit -f`)"
    if number == errno.EDQUOT:
        return f"{needed} this exceeds the disk quota in {folder}"
    free = free_bytes(folder) + reclaimed_bytes
    if free < needed_bytes:
        return f"{needed} {folder} has only {format_bytes(free)} free"
    return f"{needed} {folder} is full, although its file system reports {format_bytes(free)} free"
