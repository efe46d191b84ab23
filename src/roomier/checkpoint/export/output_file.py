"""Writes output files atomically."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from roomier.checkpoint.commit import absolute
from roomier.core.errors import CheckpointError, RoomierError


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
    """Yield a path with the name of ``output`` in a temporary folder. The caller writes to this path.

    At the end of the block, all files of the temporary folder are moved to the folder of ``output``. The file
    ``output`` itself is moved last.

    Raises:
        RoomierError: ``output`` already exists and ``may_exist`` is False.
        CheckpointError: a file cannot be written.
    """
    target = absolute(output) if may_exist else new_file(output)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise _not_written(target, error) from error
    try:
        yield folder / target.name
        for path in sorted(folder.iterdir(), key=lambda each: each.name == target.name):
            _flush(path)
            os.replace(path, target.parent / path.name)
    except OSError as error:
        raise _not_written(target, error) from error
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


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

    torch's writer terminates the process if a write raises. Therefore, errors are raised only after the writer has
    finished.

    Raises:
        OSError: a write failed.
    """
    with path.open("wb") as file:
        guarded = _FailsLate(file)
        yield guarded
        if guarded.error is not None:
            raise guarded.error


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _not_written(target: Path, error: OSError) -> CheckpointError:
    problem = f"cannot be written ({error.strerror or error})"
    return CheckpointError("output", str(target), problem, "Free some space, or choose a writable folder")
