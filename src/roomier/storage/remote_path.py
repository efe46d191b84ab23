"""Files and folders in remote storage as a ``Path``, so the code that reads checkpoints handles both kinds of storage.

A file is not copied to the local disk. Its byte ranges are fetched into memory when they are read, so a rank that reads
only its shard also transfers only its shard.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Callable, Generator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import Any, TypeVar

from roomier.core.errors import RoomierError
from roomier.storage.address import filesystem, located

T = TypeVar("T")

_FIRST_BYTES = 2**16
_GROWTH = 4
_MOST_BYTES = 2**24
_PART_BYTES = 2**22  # parts of one range are fetched in parallel
_WAITS_S = (0.2, 1.0, 3.0)
_PATIENCE_S = 20.0  # the client of the storage also retries, so an unreachable server fails after a few minutes at most
_TIMES = ("LastModified", "mtime", "updated", "created")


class StorageError(RoomierError):
    """Error of remote storage that a retry did not solve, or could not solve."""


class RemotePath(PosixPath):
    """Path in remote storage, such as ``RemotePath("s3://bucket/runs")``.

    The methods that read a file or list a folder access the storage. They raise FileNotFoundError if the path does not
    exist, and StorageError for all other problems, because a caller that skips unreadable files must not skip a
    checkpoint while the network is down. Methods that write are not supported.
    """

    _entry: dict[str, Any] | None = None  # from the listing of the parent folder

    def __str__(self) -> str:
        protocol, _, rest = super().__str__().partition(":/")
        return f"{protocol}://{rest}"

    def __fspath__(self) -> str:
        return str(self)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the type, the size and the modification time."""
        entry = self._entry or _call(self, lambda system, path: system.info(path))
        mode = stat.S_IFDIR if entry["type"] == "directory" else stat.S_IFREG
        changed = next((entry[key] for key in _TIMES if entry.get(key)), 0)
        if isinstance(changed, str):
            changed = datetime.fromisoformat(changed)
        seconds = changed.timestamp() if isinstance(changed, datetime) else changed
        return os.stat_result((mode, 0, 0, 1, 0, 0, entry["size"] or 0, seconds, seconds, seconds))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return True if the path is a file or a folder."""
        return self._mode() != 0

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return True if the path is a file."""
        return stat.S_ISREG(self._mode())

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True if the path is a folder, which exists if it contains a file."""
        return stat.S_ISDIR(self._mode())

    def is_symlink(self) -> bool:
        """Return False, because remote storage has no links."""
        return False

    def resolve(self, strict: bool = False) -> RemotePath:
        """Return the path itself."""
        return self

    def absolute(self) -> RemotePath:
        """Return the path itself."""
        return self

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """Yield the entries of the folder."""

        def listing(system: Any, path: str) -> tuple[str, list[dict[str, Any]]]:
            return path.strip("/"), system.ls(path, detail=True)

        own, entries = _call(self, listing)
        for entry in entries:
            path = entry["name"].strip("/")
            if path == own:  # a file, or an empty object that represents the folder
                continue
            found = self / path.rpartition("/")[2]
            found._entry = entry
            yield found

    def glob(self, pattern: str, **options: Any) -> Generator[RemotePath, None, None]:
        """Yield the paths that match ``pattern``, which has no ``**``."""
        first, _, rest = pattern.partition("/")
        try:
            found = [path for path in self.iterdir() if fnmatchcase(path.name, first)]
        except FileNotFoundError:
            return
        for child in found:
            if not rest:
                yield child
            elif child.is_dir():
                yield from child.glob(rest)

    def open_regular(self) -> io.RawIOBase:
        """Open the file for reading. Byte ranges are fetched when they are read."""
        found = self.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EISDIR, "Is a folder", str(self))
        return _RemoteFile(self, found.st_size)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range ``(begin, end)`` of the file. The ranges are fetched in parallel.

        Raises:
            FileNotFoundError: the file does not exist.
            StorageError: a range cannot be read.
        """

        def fetch(system: Any, path: str) -> list[bytes]:
            begins, ends = zip(*ranges, strict=True)
            parts: list[bytes] = system.cat_ranges([path] * len(ranges), list(begins), list(ends), on_error="raise")
            if [len(part) for part in parts] != [end - begin for begin, end in ranges]:
                raise OSError(errno.EIO, "The answer was truncated")
            return parts

        return _call(self, fetch) if ranges else []

    def _mode(self) -> int:
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0


def path_of(field: str, path: str | os.PathLike[str], kind: type[RoomierError] = RoomierError) -> Path:
    """Return the address or path of a user as a Path.

    Args:
        field: argument that the path was passed to, for the error message.
        kind: class of the error.

    Raises:
        RoomierError: the address is invalid, or the package of the protocol is not installed.
    """
    found = located(field, path, kind)
    if isinstance(found, Path):
        return found
    filesystem(found, field, kind)
    return RemotePath(found)


class _RemoteFile(io.RawIOBase):
    """File that fetches a block of bytes at a time. The blocks become larger if the file is read from front to end."""

    def __init__(self, path: RemotePath, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._position = 0
        self._begin = 0
        self._block = b""
        self._block_bytes = _FIRST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        if self._position >= self._size_bytes or not len(view):
            return 0
        if not self._begin <= self._position < self._begin + len(self._block):
            self._fetch(len(view))
        first = self._position - self._begin
        part = self._block[first : first + len(view)]
        view[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _fetch(self, num_wanted: int) -> None:
        is_next = self._position == self._begin + len(self._block)
        self._block_bytes = min(_GROWTH * self._block_bytes, _MOST_BYTES) if is_next else _FIRST_BYTES
        num_bytes = max(self._block_bytes, min(num_wanted, _MOST_BYTES))
        end = min(self._position + num_bytes, self._size_bytes)
        starts = range(self._position, end, _PART_BYTES)
        self._block = b""  # frees the memory before the next block is fetched
        self._block = b"".join(self._path.read_ranges([(each, min(each + _PART_BYTES, end)) for each in starts]))
        self._begin = self._position


def _call(path: RemotePath, request: Callable[[Any, str], T]) -> T:
    """Return ``request(system, name)``, and repeat it after an error that may be temporary."""
    system, name = filesystem(str(path))
    began_s = time.monotonic()
    for wait_s in (*_WAITS_S, None):
        try:
            return request(system, name)
        except FileNotFoundError as error:
            if has_no_bucket(error):
                problem = "cannot be read, because its bucket does not exist"
                raise StorageError("path", str(path), problem, "Check the name of the bucket") from error
            raise FileNotFoundError(errno.ENOENT, "Does not exist", str(path)) from error
        except Exception as error:  # each client has its own errors
            if wait_s is None or time.monotonic() - began_s > _PATIENCE_S or is_denied(error):
                raise _storage_error(path, error) from error
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def has_no_bucket(error: Exception) -> bool:
    """Return True if a client raised ``error`` because the bucket does not exist."""
    return isinstance(error, FileNotFoundError) and "specified bucket" in str(error)  # the message of S3 and GCS


def is_denied(error: Exception) -> bool:
    """Return True if a client raised ``error`` because the credentials are wrong or not sufficient."""
    kind, text = type(error).__name__, str(error)
    return isinstance(error, PermissionError) or "Credentials" in kind or text.startswith("Forbidden")


def _storage_error(path: RemotePath, error: Exception) -> StorageError:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    if is_denied(error):
        problem = f"cannot be read, because the storage denied access ({text})"
        return StorageError("path", str(path), problem, "Check the credentials, and their permissions for the bucket")
    problem = f"cannot be read ({text})"
    return StorageError("path", str(path), problem, "Check the network and the address of the server, and run it again")
