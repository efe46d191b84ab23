"""Writing to remote storage: each request is repeated after errors that may be temporary."""

import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from roomier.core.errors import CheckpointError
from roomier.core.replacing import replacing_path
from roomier.storage.address import filesystem
from roomier.storage.remote_path import RemotePath, StorageError, has_no_bucket, is_denied

T = TypeVar("T")

WAITS_S = [1.0, 2.0, 4.0, 8.0, 16.0]
"""Times to wait before a request is repeated. The client of the storage also repeats some requests."""

CLAIM_NAME = ".claim"
"""Name of the file by which a run reserves a folder."""

_PART_BYTES = 16 * 2**20
_PROTOCOLS_IN_PARTS = ("s3", "gs")


class ConflictError(CheckpointError):
    """Error for a file that another process has created first. Repeating the request does not help."""


def put(file: Path, target: RemotePath) -> None:
    """Copy the local ``file`` to ``target``. Large files are sent in parts.

    Raises:
        CheckpointError: the storage refuses the file, or cannot be reached.
    """
    options = {"chunksize": _PART_BYTES} if str(target).startswith(_PROTOCOLS_IN_PARTS) else {}
    _repeated(target, lambda system, path: system.put_file(os.fspath(file), path, **options))


def create(
    target: RemotePath, data: bytes, *, before: Callable[[], None] | None = None, waits_s: Sequence[float] | None = None
) -> None:
    """Create the object ``target`` if it does not exist. Only one of several processes succeeds.

    Args:
        before: function that is called before each attempt. It may raise a ConflictError.
        waits_s: times to wait before the request is repeated; None for the default.

    Raises:
        ConflictError: the object exists with a different content.
        CheckpointError: the storage refuses the object, or cannot be reached.
    """

    def create_once(system: Any, path: str) -> None:
        if before is not None:
            before()
        try:
            system.pipe_file(path, data, mode="create")
        except Exception as error:
            # The clients report this case differently. It can also be the second attempt of a request that succeeded.
            existing = None
            with suppress(StorageError):  # the first error tells more, and may be temporary
                existing = read_bytes(target)
            if existing is None:
                raise
            if existing != data:
                problem = "was written by another run at the same time"
                action = "Use a different dirpath or filename for each run"
                raise ConflictError("checkpoint", str(target.parent), problem, action) from error

    _repeated(target, create_once, waits_s)


def read_bytes(target: RemotePath) -> bytes | None:
    """Return the content of the object ``target``, or None if it does not exist."""
    try:
        with target.open_regular() as file:
            return file.readall()
    except FileNotFoundError:
        return None


def write_bytes(target: RemotePath, data: bytes) -> None:
    """Create or replace the object ``target``. For the errors, see :func:`put`."""
    _repeated(target, lambda system, path: system.pipe_file(path, data))


def fetch_newer(remote: RemotePath, local: Path) -> None:
    """Copy the files in the folder ``remote``, except for checkpoints and hidden files, to ``local``. A local file that
    is newer than its copy in the storage is kept.

    Raises:
        CheckpointError: the storage cannot be read.
    """
    local.mkdir(parents=True, exist_ok=True)
    for entry in remote.iterdir():
        target, state = local / entry.name, entry.stat()
        if entry.name[0] == ".":
            continue
        if stat.S_ISDIR(state.st_mode):
            if entry.name != "checkpoints":
                fetch_newer(entry, target)
        elif not target.exists() or target.stat().st_mtime < state.st_mtime:
            with replacing_path(target) as aside:
                fetch(entry, aside)


def fetch(remote: RemotePath, local: Path) -> None:
    """Copy the file ``remote`` to ``local``. Raises CheckpointError if the storage cannot be read."""
    _repeated(remote, lambda system, path: system.get_file(path, os.fspath(local)))


def delete(target: RemotePath, *, first: str = "", kept: str = "") -> None:
    """Delete the file ``target``, or all files in the folder ``target``. For the errors, see :func:`put`.

    Args:
        first: name of the file that is deleted first.
        kept: name of a file that is not deleted.
    """
    names = sorted(sizes_in(target), key=lambda name: name != first)
    for path in [target / name for name in names if name != kept] or [target]:
        _repeated(path, _remove_once)


def _remove_once(system: Any, path: str) -> None:
    with suppress(FileNotFoundError):
        system.rm_file(path)


def sizes_in(folder: RemotePath) -> dict[str, int]:
    """Return the sizes in bytes of the files in ``folder`` by name; empty if the folder does not exist."""
    try:
        return {each.name: each.stat().st_size for each in folder.iterdir() if each.is_file()}
    except FileNotFoundError:
        return {}


def _repeated(target: RemotePath, request: Callable[[Any, str], T], waits_s: Sequence[float] | None = None) -> T:
    for wait_s in (*(WAITS_S if waits_s is None else waits_s), None):
        try:
            return request(*filesystem(str(target)))
        except ConflictError:
            raise
        except Exception as error:  # each client has its own errors
            if wait_s is None or is_denied(error) or has_no_bucket(error):
                raise _cannot_write(target, error) from error
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _cannot_write(target: RemotePath, error: Exception) -> CheckpointError:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    if has_no_bucket(error):
        problem = "cannot be written, because its bucket does not exist"
        return CheckpointError("path", str(target), problem, "Create the bucket, or check its name")
    if is_denied(error):
        problem = f"cannot be written, because the storage denied access ({text})"
        action = "Check the credentials, and their permission to write to the bucket"
        return CheckpointError("path", str(target), problem, action)
    action = "Check the network and the address of the server"
    return CheckpointError("path", str(target), f"cannot be written ({type(error).__name__}: {text})", action)
