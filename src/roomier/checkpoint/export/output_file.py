"""Writes output files atomically."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roomier.checkpoint.commit import absolute
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.replacing import replacing_path


def new_file(output: str | Path) -> Path:
    """Return the absolute path of ``output``, which must not exist.

    Raises:
        RoomierError: ``output`` already exists.
    """
    target = absolute(output)
    if target.exists():
        raise RoomierError("output", str(output), "already exists", "Choose another name")
    return target


@contextmanager
def replacing_file(output: str | Path, *, may_exist: bool = False) -> Iterator[Path]:
    """Replace ``output`` as :func:`roomier.core.replacing.replacing_path` does, and report errors of the disk.

    Raises:
        RoomierError: ``output`` already exists and ``may_exist`` is False.
        CheckpointError: a file cannot be written.
    """
    target = absolute(output) if may_exist else new_file(output)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing_path(target) as aside:
            yield aside
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        action = "Free some space, or choose a writable folder"
        raise CheckpointError("output", str(target), problem, action) from error


class _FailsLate(io.RawIOBase):
    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._try(lambda: self._file.write(view))
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._try(lambda: self._file.seek(offset, whence))
        return offset

    def _try(self, function: Callable[[], int]) -> None:
        if self.error is None:
            try:
                function()
            except OSError as error:
                self.error = error


@contextmanager
def for_torch(path: Path) -> Iterator[Any]:
    """Open the new file ``path`` for torch's writer, and raise write errors at the end of the block.

    torch's writer terminates the process if a write raises. Errors are therefore raised only after the writer has
    finished.

    Raises:
        OSError: a write failed.
    """
    with path.open("wb") as file:
        guarded = _FailsLate(file)
        yield guarded
        if guarded.error is not None:
            raise guarded.error
