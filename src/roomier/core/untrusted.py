"""Read files that may be damaged or malicious. Only regular files of bounded size and nesting are read.

A pipe would block the process, and a device such as ``/dev/zero`` would fill its memory, so every file of a run folder
and every file that a user names is opened here. No function waits for another process or reads more bytes than its
limit. All errors are OSErrors or ValueErrors.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO, runtime_checkable

MAX_DEPTH = 100
"""Maximum nesting of lists and mappings, because the functions that process the data are recursive."""
MAX_TEXT_BYTES = 2**24
"""Default maximum size of a file, and maximum size of a line."""
MAX_YAML_BYTES = 2**20
"""Maximum size of a YAML file, which is smaller because PyYAML needs about one kilobyte of memory for each value."""


def open_regular(path: str | Path) -> RawIOBase:
    """Open a regular file, or a link to one, for unbuffered reading.

    Raises:
        OSError: the file cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    if isinstance(path, OpensItself):
        return path.open_regular()
    return FileIO(_open(path, os.O_RDONLY))


@runtime_checkable
class OpensItself(Protocol):
    """Path that is not in the local file system, see ``storage/remote_path.py``."""

    def open_regular(self) -> RawIOBase:
        """Open the file for unbuffered reading."""


def size_of(file: RawIOBase) -> int:
    """Return the size of an open file, and seek to its beginning."""
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    return num_bytes


def open_to_append(path: str | Path) -> TextIO:
    """Open a regular file, or create it, to append UTF-8 text. For the errors, see :func:`open_regular`."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8", newline="")


def _open(path: str | Path, flags: int) -> int:
    # Without O_NONBLOCK, open() would block on a pipe to which no process writes. Regular files ignore O_NONBLOCK.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def check_regular(path: str | Path) -> None:
    """Raise an OSError if :func:`open_regular` would. Use this function before another library opens the file."""
    open_regular(path).close()


def read_regular(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be opened (see :func:`open_regular`), or has more than ``max_bytes``.
    """
    with open_regular(path) as file:
        if size_of(file) > max_bytes:
            raise OSError(errno.EFBIG, f"Larger than {max_bytes} bytes", str(path))
        chunks = []
        while max_bytes >= 0 and (chunk := file.read(max_bytes + 1)):
            chunks.append(chunk)
            max_bytes -= len(chunk)
        if max_bytes < 0:
            raise OSError(errno.EFBIG, "Grew while it was read", str(path))
        return b"".join(chunks)


def read_text(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the UTF-8 text in a regular file.

    Raises:
        OSError: see :func:`read_regular`.
        ValueError: the file is not UTF-8, or ``path`` contains a null character.
    """
    return read_regular(path, max_bytes).decode("utf-8")


def lines_of(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a regular file of any size, with their line breaks.

    Raises:
        OSError: the file cannot be opened (see :func:`open_regular`), or a line exceeds :data:`MAX_TEXT_BYTES`.
    """
    with open_regular(path) as raw, BufferedReader(raw) as file:
        while line := file.readline(MAX_TEXT_BYTES + 1):
            if len(line) > MAX_TEXT_BYTES:
                raise OSError(errno.EFBIG, f"A line is longer than {MAX_TEXT_BYTES} bytes", str(path))
            yield line


def read_json(path: str | Path, **hooks: Any) -> Any:
    """Return the value in a JSON file. For the arguments and errors, see :func:`read_text` and :func:`parse_json`."""
    return parse_json(read_text(path), **hooks)


def parse_json(data: bytes | str, **hooks: Any) -> Any:
    """Parse a JSON text and return its value.

    Args:
        data: the text.
        hooks: hooks of ``json.loads``. By default, NaN and infinity are rejected.

    Raises:
        ValueError: the text is not JSON, or is nested more than :data:`MAX_DEPTH` levels deep.
    """
    try:
        value = json.loads(data, **{"parse_constant": _refuse_constant} | hooks)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError if ``value`` is nested more than :data:`MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if type(each) in (dict, list)]
        if not level:
            return
        level = [item for each in level for item in (each.values() if type(each) is dict else each)]
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
