"""Folders for offloading: selection of the folder, its file system, its free space, and removal of the files of crashed
runs."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from roomier.core.errors import TierError
from roomier.core.log import notice
from roomier.core.paths import check_path

if sys.platform != "win32":
    import fcntl

FIELD = "offload.folder"
PREFIX, SUFFIX = "roomier-offload-", ".scratch"
_IN_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "afs", "9p", "pvfs2"),
    *("panfs", "virtiofs", "wekafs", "daos"),
}


def offload_folder(folder: str | Path | None) -> Path:
    """Return the absolute path of the folder for offloading, and print a notice if the folder is unsuitable.

    The default is the folder for temporary files. If the folder for temporary files is in memory, the default is
    ``roomier/offload`` in the user's cache folder. This folder is created if it does not exist.

    Raises:
        TierError: the folder does not exist, cannot be created, is not a folder, or is not writable.
    """
    if folder is None:
        chosen = default_folder()
        notice(f"offloaded data is stored in {chosen}; offload={{'folder': ...}} selects a different folder")
    else:
        check_path(FIELD, folder, TierError)
        chosen = Path(folder).expanduser().absolute()
    other = "choose a different folder with offload={'folder': ...}"
    if not chosen.exists():
        raise TierError(FIELD, str(chosen), "does not exist", f"Create the folder, or {other}")
    if not chosen.is_dir():
        raise TierError(FIELD, str(chosen), "is not a folder", other.capitalize())
    if not os.access(chosen, os.W_OK | os.X_OK):
        raise TierError(FIELD, str(chosen), "is not writable", f"Change its permissions, or {other}")
    kind = file_system_of(chosen)
    if kind in _IN_MEMORY:
        notice(f"{chosen} is in host memory ({kind}), so offloading to this folder does not free host memory")
    elif kind is not None and (kind in _NETWORK or kind.startswith("fuse.")):
        notice(f"{chosen} is on a network file system ({kind}), which can be slow; use a folder on a local disk")
    return chosen


def default_folder() -> Path:
    """Return the default folder for offloading; see :func:`offload_folder`.

    Raises:
        TierError: the folder cannot be created.
    """
    temporary = Path(tempfile.gettempdir())
    if file_system_of(temporary) not in _IN_MEMORY:
        return temporary
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roomier" / "offload"
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        action = "Choose a folder on a disk with offload={'folder': ...}"
        raise TierError(FIELD, str(cache), f"cannot be created: {error}", action) from error
    return cache


def file_system_of(folder: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Return the type of the file system of ``folder``, such as ``"ext4"``; None if the system does not report it."""
    path = str(folder.resolve())
    best, kind = -1, None
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        _, place, name, *_ = line.split(" ")
        place = place.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
        if (path == place or path.startswith(place.rstrip("/") + "/")) and len(place) >= best:
            best, kind = len(place), name
    return kind


def remove_abandoned(folder: Path) -> None:
    """Remove the files that no process has locked. These files belong to crashed runs. Print a notice for each of
    these files that is not empty."""
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # the file has just been removed, or belongs to a different user
            continue
        try:
            if not lock(file):
                continue
            num_bytes = os.fstat(file).st_size
            path.unlink()
        except OSError:
            continue
        finally:
            os.close(file)
        if num_bytes > 0:  # an empty file can belong to a run that is starting, which then creates a different file
            notice(f"removed {path} ({num_bytes / 2**30:.1f} GiB), the file of a run that crashed", every_rank=True)


def lock(file: int) -> bool:
    """Lock an open file until this process closes the file or ends. Return False if a different process has locked the
    file."""
    if sys.platform == "win32":
        raise TierError(FIELD, None, "is not supported on Windows", "Offload to 'cpu' instead")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
