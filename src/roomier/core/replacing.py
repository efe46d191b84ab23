"""Replace files atomically.

A file is written in a temporary folder next to its target, flushed, and renamed. If the process is killed, the target
is either the complete old file or the complete new file, and the temporary folder remains. The first write of a later
process to the same folder removes it.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import psutil

# The processes of another machine cannot be checked, so their files are considered abandoned after this time.
_FOREIGN_STALE_AFTER_S = 24 * 3600.0
OWNER = r"(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}"
"""Pattern of :func:`new_owner`."""
_ASIDE = re.compile(rf"\..+@{OWNER}\.aside")
_OWNED = re.compile(rf".+@{OWNER}")

_cleared: set[Path] = set()


@contextmanager
def replacing_path(path: Path) -> Iterator[Path]:
    """Yield a path with the name of ``path`` in a temporary folder. The caller creates a file or a link there.

    If the block ends without an error, all files of the temporary folder are moved to the folder of ``path``. The file
    that replaces ``path`` is moved last.
    """
    # Once per process, because a folder can contain many files.
    if path.parent not in _cleared and not _ASIDE.fullmatch(path.parent.name):
        _cleared.add(path.parent)
        for old in abandoned_in(path.parent, _ASIDE):
            shutil.rmtree(old, ignore_errors=True)
    folder = path.with_name(f".{path.name}@{new_owner()}.aside")
    folder.mkdir()
    try:
        yield folder / path.name
        for written in sorted(folder.iterdir(), key=lambda written: written.name == path.name):
            if not written.is_symlink():
                handle = os.open(written, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            os.replace(written, path.with_name(written.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a text file that replaces ``path`` if the block ends without an error."""
    with replacing_path(path) as aside, aside.open("x", encoding="utf-8", newline="") as file:
        yield file


def this_host() -> str:
    """Return an identifier of this machine and, in a container, of its process ids."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    return f"{zlib.crc32(f'{platform.node()}{processes}'.encode()):08x}"


def new_owner() -> str:
    """Return a unique text that identifies this process, for the name of a temporary file."""
    return f"{this_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def abandoned_in(folder: Path, pattern: re.Pattern[str] = _OWNED, *, also_own: bool = False) -> list[Path]:
    """Return the entries of ``folder`` that were created by processes that have exited.

    Args:
        folder: folder, which may not exist.
        pattern: pattern of the names of the entries, with the groups of :data:`OWNER`.
        also_own: True to also return the entries of this process.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := pattern.fullmatch(path.name)) is not None:
            host, pid = match["host"], int(match["pid"])
            with suppress(FileNotFoundError):  # another process clears the same folder
                if (also_own and (host, pid) == (this_host(), os.getpid())) or is_abandoned(path, host, pid):
                    found.append(path)
    return found


def is_abandoned(path: Path, host: str, pid: int) -> bool:
    """Return True if the process ``pid``, which created ``path``, has exited. For a process on another machine, return
    True if ``path`` has not changed for a day."""
    # Renaming a folder updates its ctime, but not its mtime.
    changed_at_s = path.lstat().st_ctime
    if host != this_host():
        newest_s = max([changed_at_s, *(each.lstat().st_ctime for each in path.glob("*"))])
        return time.time() - newest_s > _FOREIGN_STALE_AFTER_S
    try:
        process = psutil.Process(pid)
        # If the process started after the folder was created, the process id was reused by a different process. The
        # start time of a process has a resolution of one second.
        return process.status() == psutil.STATUS_ZOMBIE or process.create_time() > changed_at_s + 1
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
