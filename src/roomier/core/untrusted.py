"""Read files that may be damaged or malicious. Only regular files of bounded size and nesting are read.

All errors are OSErrors or ValueErrors. No function waits for another process or reads more bytes than its limit.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

MAX_DEPTH = 100
"""Maximum nesting of lists and mappings, because the functions that process the data are recursive."""


def open_regular(path: Path) -> FileIO:
    """Open a regular file, or a link to one, for unbuffered reading.

    Raises:
        OSError: the file cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    # Without O_NONBLOCK, open() would block on a pipe to which no process writes. Regular files ignore O_NONBLOCK.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be opened (see :func:`open_regular`), or has more than ``max_bytes``.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"Larger than {max_bytes} bytes", str(path))
        chunks = []
        while max_bytes >= 0 and (chunk := file.read(max_bytes + 1)):
            chunks.append(chunk)
            max_bytes -= len(chunk)
        if max_bytes < 0:
            raise OSError(errno.EFBIG, "Grew while it was read", str(path))
        return b"".join(chunks)


def parse_json(data: bytes | str) -> Any:
    """Parse a JSON text and return its value.

    Raises:
        ValueError: the text is not JSON, or is nested more than :data:`MAX_DEPTH` levels deep.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
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
