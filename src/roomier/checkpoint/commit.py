"""A checkpoint folder appears whole, by one rename, or not at all.

[Note: what a kill can leave behind]
A folder is filled under the name ``.tmp-<name>@<owner>`` beside its target, flushed, and renamed. When the
target exists, it first steps aside to ``.old-<name>@<owner>``, because a folder cannot be renamed onto one that
is not empty:

1. before the first rename     target: the old one    (``.tmp-``: unfinished or unused)
2. between the two renames     ``.old-``: the old one  (``.tmp-``: the new one, unused)
3. after the second rename     target: the new one    (``.old-``: superseded)

So in each state a complete checkpoint stands under the target's name or, in state 2, under ``.old-``, where
:func:`standing` and the listing look for it. The next save into the same parent folder clears what dead
processes left: state 2 is rolled back, the rest is deleted. Deleting starts with the record, after which a
folder no longer counts as complete.
"""

import errno
import os
import platform
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from roomier.checkpoint.record import RECORD_NAME
from roomier.core.errors import CheckpointError
from roomier.core.log import notice
from roomier.core.units import format_bytes

# Whether a process on another machine lives cannot be asked from here.
_FOREIGN_STALE_AFTER_S = 24 * 3600.0
# What file systems say that know none (network shares, FUSE): there is nothing to do then, and nothing failed.
_NO_FSYNC_OF_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
_ASIDE = re.compile(r"\.(?P<kind>tmp|old)-(?P<target>.+)@(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}")


@dataclass(frozen=True)
class _Aside:
    """A folder that stands beside its target: one being written or deleted (tmp), or one replaced (old)."""

    path: Path
    kind: str
    target: Path
    host: str
    pid: int

    @staticmethod
    def parse(path: Path) -> "_Aside | None":
        match = _ASIDE.fullmatch(path.name)
        if match is None:
            return None
        return _Aside(path, match["kind"], path.with_name(match["target"]), match["host"], int(match["pid"]))

    def is_stale(self) -> bool:
        """Whether the process that made it is gone."""
        # The rename to this name counts as a change of the folder, unlike in its mtime.
        changed_at_s = self.path.lstat().st_ctime
        if self.host != _host():
            return time.time() - changed_at_s > _FOREIGN_STALE_AFTER_S
        try:
            process = psutil.Process(self.pid)
            # A process younger than the folder was given the number of the one that made it; its start is
            # known to a second.
            return process.status() == psutil.STATUS_ZOMBIE or process.create_time() > changed_at_s + 1
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


def _host() -> str:
    return f"{zlib.crc32(platform.node().encode()):08x}"


def _aside_path(kind: str, target: Path) -> Path:
    return target.with_name(f".{kind}-{target.name}@{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def committed_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """A new empty folder to fill, which becomes ``target`` when the block ends and is removed when it fails.

    A checkpoint at ``target`` is replaced. ``num_bytes`` is what will be written, for the error message.

    Raises:
        CheckpointError: the disk is full, the folder cannot be written, or ``target`` is something else than
            a checkpoint. Whatever stood at ``target`` still stands there.
    """
    aside = _aside_path("tmp", target)
    try:
        _refuse_to_overwrite(target)
        _make_folder(target.parent)
        clear_stale(target.parent)
        aside.mkdir()
        yield aside
        sync_folder(aside)
        _put_in_place(aside, target)
    except BaseException as error:
        _delete(aside)
        if isinstance(error, OSError):
            raise _cannot_write(target, num_bytes, error) from error
        raise


@contextmanager
def disk_errors(target: Path, num_bytes: int, aside: Path) -> Iterator[None]:
    """What the system says of a file in ``aside``, as an error about the checkpoint ``target``, of which this rank
    writes ``num_bytes``."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(target, num_bytes, error, aside) from error


def _refuse_to_overwrite(target: Path) -> None:
    if not os.path.lexists(target) or (target / RECORD_NAME).exists():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise CheckpointError(
            "path", str(target), "exists and is not a checkpoint", "Choose another path, or move it out of the way"
        )


def _put_in_place(aside: Path, target: Path) -> None:
    replaced = _aside_path("old", target) if target.exists() else None
    try:
        if replaced is not None:
            os.rename(target, replaced)
        os.rename(aside, target)
    except BaseException:
        if replaced is not None and replaced.exists():
            os.rename(replaced, target)
        raise
    sync_folder(target.parent)
    if replaced is not None:
        _delete(replaced)


def at_home(path: str | Path) -> Path:
    """``path`` with the home folder for ``~``: a folder of that name is never what is meant."""
    return Path(os.path.expanduser(path))


def absolute(path: str | Path) -> Path:
    """``path`` from the root on, and with the home folder for ``~``."""
    return Path(os.path.abspath(at_home(path)))


def remove(path: str | Path) -> None:
    """Delete the checkpoint ``path``. A kill half way leaves no part of it under its name.

    Raises:
        CheckpointError: ``path`` is no checkpoint folder, or may not be deleted.
    """
    target = absolute(path)
    if not (target / RECORD_NAME).is_file():
        raise CheckpointError(
            "path", str(target), f"is not a checkpoint: it has no {RECORD_NAME}", "Give the path of a checkpoint folder"
        )
    doomed = _aside_path("tmp", target)
    try:
        os.rename(target, doomed)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            "path", str(target), f"cannot be removed: {error.strerror}", "Check who owns it and its parent folder"
        ) from error
    _delete(doomed)
    if doomed.exists():
        notice(f"could not delete all of a removed checkpoint; what is left takes space in {doomed}")


def standing(path: Path) -> Path:
    """Where the checkpoint of this name stands: at ``path``, or aside if a kill struck while it was replaced."""
    path = at_home(path)
    if os.path.lexists(path) or not path.parent.is_dir():
        return path
    return next((old for old in replaced_in(path.parent) if old.name.startswith(f".old-{path.name}@")), path)


def replaced_in(folder: Path) -> list[Path]:
    """The folders in ``folder`` that stepped aside for a successor which is not there."""
    asides = [aside for path in folder.iterdir() if (aside := _Aside.parse(path))]
    return [aside.path for aside in asides if aside.kind == "old" and not os.path.lexists(aside.target)]


def names_being_written(folder: Path) -> set[str]:
    """Return the names of the checkpoints that other processes are writing to ``folder``."""
    names = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        aside = _Aside.parse(path)
        with suppress(FileNotFoundError):  # the other process has renamed the folder
            is_own = aside is not None and (aside.host, aside.pid) == (_host(), os.getpid())
            if aside is not None and aside.kind == "tmp" and not is_own and not aside.is_stale():
                names.add(aside.target.name)
    return names


def clear_stale(folder: Path) -> None:
    """Clear what saves of dead processes left in ``folder``; what stood aside steps back. Raises OSError."""
    for path in folder.iterdir():
        aside = _Aside.parse(path)
        # Another process may clear the same folder: what is gone is gone.
        with suppress(FileNotFoundError):
            if aside is None or not aside.is_stale():
                continue
            is_only_one = aside.kind == "old" and (path / RECORD_NAME).exists() and not aside.target.exists()
            if is_only_one:
                os.rename(path, aside.target)
            else:
                _delete(path)


def _delete(folder: Path) -> None:
    """Delete ``folder`` as far as possible, its record first. What stays is cleared by a later save."""
    with suppress(OSError):
        if os.path.islink(folder):
            os.unlink(folder)
            return
        (folder / RECORD_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk: a rename is not durable before that. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC_OF_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def _cannot_write(target: Path, num_bytes: int, error: OSError, aside: Path | None = None) -> CheckpointError:
    folder = target.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        # What was written so far is about to be deleted.
        half_done = list(aside.iterdir()) if aside is not None and aside.is_dir() else []
        free_bytes = shutil.disk_usage(folder).free + sum(path.stat().st_blocks * 512 for path in half_done)
        problem = (
            f"cannot be written: {reason}; it needs {format_bytes(num_bytes)} and {format_bytes(free_bytes)} "
            f"are free in {folder}"
        )
        action = "Free space, keep fewer checkpoints, or choose another folder; the earlier ones are untouched"
    else:
        problem = f"cannot be written: {reason} ({error.filename or folder})"
        is_too_long = error.errno == errno.ENAMETOOLONG
        action = "Choose a shorter name" if is_too_long else "Choose a folder this process may write to"
    return CheckpointError("path", str(target), problem, action)
