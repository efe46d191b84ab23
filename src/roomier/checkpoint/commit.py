"""Atomic commit of a checkpoint folder: a single rename makes the complete folder visible.

[Note: state after a kill]
A folder is filled under the name ``.tmp-<name>@<owner>`` next to its target, flushed, and renamed. Because a folder
cannot be renamed to the path of a folder that is not empty, an existing target is first renamed to
``.old-<name>@<owner>``. A killed process leaves one of three states:

1. before the first rename     target: the old checkpoint    (``.tmp-``: incomplete or unused)
2. between the two renames     ``.old-``: the old checkpoint  (``.tmp-``: the new checkpoint, unused)
3. after the second rename     target: the new checkpoint    (``.old-``: superseded)

In each state, a complete checkpoint exists, under the name of the target or, in state 2, under an ``.old-`` name.
:func:`surviving_path` and :func:`roomier.checkpoint.find.list_complete` find it under both names. The next save into
the same parent folder clears the folders of dead processes: in state 2, it restores the name of the old checkpoint, and
it deletes all other leftovers. Deletion starts with the record, because a folder without a record is not a complete
checkpoint.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from roomier.checkpoint.record import RECORD_NAME, has_lost_record
from roomier.core.disk_space import NO_SPACE, shortage
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.log import notice
from roomier.core.paths import check_path, protocol_of
from roomier.core.replacing import OWNER, is_abandoned, new_owner, this_host
from roomier.storage.remote_path import RemotePath, path_of

SET_ASIDE_SUFFIX = ".damaged"

# Errors of file systems that do not support fsync on folders (network shares, FUSE). They can be ignored.
_NO_FSYNC_OF_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
_ASIDE = re.compile(rf"\.(?P<kind>tmp|old)-(?P<target>.+)@{OWNER}")


@dataclass(frozen=True)
class _Aside:
    """Temporary folder next to a checkpoint folder. The temporary folder is being written or deleted (tmp), or contains
    the checkpoint that was replaced (old).
    """

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
        """Return True if the process that created the folder has exited."""
        return is_abandoned(self.path, self.host, self.pid)


def _aside_path(kind: str, target: Path) -> Path:
    return target.with_name(f".{kind}-{target.name}@{new_owner()}")


@contextmanager
def committed_folder(target: Path, num_bytes: int) -> Iterator[Path]:
    """Create an empty folder. At the end of the ``with`` block, the folder is renamed to ``target``. After an error,
    the folder is removed.

    An existing checkpoint at ``target`` is replaced. A checkpoint without its record is renamed; see :func:`set_aside`.

    Args:
        target: path of the checkpoint.
        num_bytes: size of the data to write, for the error message.

    Raises:
        CheckpointError: the disk is full, the folder cannot be written, or ``target`` exists and is not a checkpoint.
            An existing folder at ``target`` is unchanged.
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
    """Convert an OSError in the ``with`` block to an error about the checkpoint ``target``.

    Args:
        target: path of the checkpoint.
        num_bytes: size of the data that all ranks write.
        aside: folder that is being written.
    """
    try:
        yield
    except OSError as error:
        raise _cannot_write(target, num_bytes, error, aside) from error


def set_aside(folder: Path) -> None:
    """Rename a checkpoint that lost its record, so that a save can use its name, and print a notice. Raises OSError."""
    aside = folder
    while os.path.lexists(aside):
        aside = aside.with_name(f"{aside.name}{SET_ASIDE_SUFFIX}")
    os.rename(folder, aside)
    notice(f"renamed {folder} to {aside.name}, because it is a checkpoint without its {RECORD_NAME}")


def _refuse_to_overwrite(target: Path) -> None:
    if has_lost_record(target):
        set_aside(target)
    if not os.path.lexists(target) or (target / RECORD_NAME).exists():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise CheckpointError(
            "path", str(target), "exists and is not a checkpoint", "Choose another path, or move the file or folder"
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


def at_home(path: str | Path, field: str = "checkpoint", kind: type[RoomierError] = CheckpointError) -> Path:
    """Return ``path`` with ``~`` replaced by the home folder. An address such as ``"s3://..."`` becomes a RemotePath.

    Args:
        field: argument that the path was passed to, for the error message.
        kind: class of the error.

    Raises:
        RoomierError: see :func:`roomier.core.paths.check_path` and :func:`roomier.storage.remote_path.path_of`.
    """
    if protocol_of(path):
        return path_of(field, path, kind)
    check_path(field, path, kind)
    return Path(os.path.expanduser(path))


def absolute(path: str | Path) -> Path:
    """Return the absolute path of ``path``, with ``~`` replaced by the home folder."""
    check_path("checkpoint", path, CheckpointError)
    return Path(os.path.abspath(at_home(path)))


def remove(path: str | Path) -> None:
    """Delete the checkpoint ``path``. If the process is killed during the deletion, no incomplete checkpoint remains at
    ``path``.

    Args:
        path: checkpoint folder.

    Raises:
        CheckpointError: ``path`` is not a checkpoint folder, or cannot be deleted.
    """
    target = absolute(path)
    if not (target / RECORD_NAME).is_file():
        raise CheckpointError(
            "path", str(target), f"is not a checkpoint: it has no {RECORD_NAME}", "Pass the path of a checkpoint folder"
        )
    doomed = _aside_path("tmp", target)
    try:
        os.rename(target, doomed)
        sync_folder(target.parent)
    except OSError as error:
        action = "Check the owner of this folder and of its parent folder"
        raise CheckpointError("path", str(target), f"cannot be removed: {error.strerror}", action) from error
    _delete(doomed)
    if doomed.exists():
        notice(f"could not delete all files of a removed checkpoint; the rest uses disk space in {doomed}")


def surviving_path(path: str | Path) -> Path:
    """Return ``path``, or the ``.old-`` path if a process was killed while it replaced the checkpoint at ``path``."""
    path = at_home(path)
    if isinstance(path, RemotePath) or os.path.lexists(path) or not path.parent.is_dir():
        return path
    return next((old for old in replaced_in(path.parent) if old.name.startswith(f".old-{path.name}@")), path)


def replaced_in(folder: Path) -> list[Path]:
    """Return the ``.old-`` folders in ``folder`` whose target does not exist. Remote storage has no such folders."""
    if isinstance(folder, RemotePath):
        return []
    asides = [aside for path in folder.iterdir() if (aside := _Aside.parse(path))]
    return [aside.path for aside in asides if aside.kind == "old" and not os.path.lexists(aside.target)]


def names_being_written(folder: Path) -> set[str]:
    """Return the names of the checkpoints that other processes are writing to ``folder``."""
    names = set()
    for path in folder.iterdir() if folder.is_dir() else ():
        aside = _Aside.parse(path)
        with suppress(FileNotFoundError):  # another process has already renamed the folder
            is_own = aside is not None and (aside.host, aside.pid) == (this_host(), os.getpid())
            if aside is not None and aside.kind == "tmp" and not is_own and not aside.is_stale():
                names.add(aside.target.name)
    return names


def clear_stale(folder: Path) -> None:
    """Remove leftovers of dead processes in ``folder`` and restore the name of each old checkpoint that was not
    replaced.

    Raises:
        OSError: the folder cannot be read or changed.
    """
    for path in folder.iterdir():
        aside = _Aside.parse(path)
        # Another process can clear the same folder at the same time.
        with suppress(FileNotFoundError):
            if aside is None or not aside.is_stale():
                continue
            is_only_one = aside.kind == "old" and (path / RECORD_NAME).exists() and not aside.target.exists()
            if is_only_one:
                os.rename(path, aside.target)
            else:
                _delete(path)


def _delete(folder: Path) -> None:
    """Delete ``folder`` as far as possible, starting with its record. A later save deletes the remaining files."""
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
    """Flush the entries of ``folder`` to the disk. A rename is durable only after this call. Raises OSError."""
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
    if error.errno in NO_SPACE:
        # The incomplete folder is deleted afterwards, so its size counts as free space.
        half_done = list(aside.iterdir()) if aside is not None and aside.is_dir() else []
        reclaimed_bytes = sum(path.stat().st_blocks * 512 for path in half_done)
        problem = f"cannot be written: {reason}. The checkpoint "
        problem += shortage(folder, num_bytes, error.errno, reclaimed_bytes)
        action = "Free some space, keep fewer checkpoints, or choose another folder. Existing checkpoints are unchanged"
    else:
        problem = f"cannot be written: {reason} ({error.filename or folder})"
        is_too_long = error.errno == errno.ENAMETOOLONG
        action = "Choose a shorter name" if is_too_long else "Choose a folder that this process can write to"
    return CheckpointError("path", str(target), problem, action)
