"""A file that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from roomier.checkpoint.commit import absolute
from roomier.core.errors import CheckpointError, RoomierError


def new_file(output: str | Path) -> Path:
    """``output``, where nothing stands yet.

    Raises:
        RoomierError: something does.
    """
    target = absolute(output)
    if target.exists():
        raise RoomierError("output", str(output), "is there already", "Choose another name")
    return target


@contextmanager
def replacing_file(output: str | Path, *, may_exist: bool = False) -> Iterator[Path]:
    """A path to write to. It has the name of ``output``, in a folder beside it; what stands in that folder at the end
    takes its place beside ``output``, that itself last.

    Raises:
        RoomierError: ``output`` is there already.
        CheckpointError: it cannot be written.
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


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _not_written(target: Path, error: OSError) -> CheckpointError:
    problem = f"cannot be written ({error.strerror or error})"
    return CheckpointError("output", str(target), problem, "Free space, or name a file in a folder you can write to")
