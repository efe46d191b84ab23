"""Find checkpoints: list the complete checkpoints, find the newest checkpoint, and verify a checkpoint."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from roomier.checkpoint.commit import SET_ASIDE_SUFFIX, at_home, replaced_in, set_aside, surviving_path
from roomier.checkpoint.record import (
    MAX_COMMIT_NUMBER,
    DamagedCheckpointError,
    NotACheckpointError,
    Record,
    check_sizes,
    check_sums,
    has_lost_record,
    read_commit_number,
    read_record,
    read_state,
)
from roomier.checkpoint.tree import fill
from roomier.core.errors import CheckpointError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.storage.mirror import remote_of
from roomier.storage.remote_path import RemotePath

Check: TypeAlias = Callable[[Path, dict[str, Any]], None]
"""Function that raises a CheckpointError if the state that ``peek`` returned for the checkpoint cannot be used."""


_NUM_SHOWN = 3


class NoUsableCheckpointError(CheckpointError):
    """Error for a folder in which checkpoints exist, but none can be used."""


@dataclass(frozen=True)
class _Complete:
    path: Path
    record: Record
    group_ns: int

    @property
    def age_key(self) -> tuple[int, int, int, int, str]:
        """Key that orders checkpoints from old to new.

        Checkpoints without commit numbers are ordered by the latest save time in their parent folder. Within a folder,
        checkpoints are ordered by step, because the clock may have been set back during a run.
        """
        record = self.record
        group_ns = 0 if record.commit_number else self.group_ns
        return record.commit_number, group_ns, record.global_step, record.saved_at_ns, str(self.path)


_Damaged: TypeAlias = tuple[Path, str]
"""Path of a damaged checkpoint, and the problem."""


def list_complete(folder: str | Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, the oldest first; an empty list if the folder does not exist.

    A checkpoint is complete if its record is valid and every file that the record lists has its full size. The contents
    of the files are not read; :func:`verify` reads them. A checkpoint that a killed process was replacing is listed
    under its ``.old-`` name.
    """
    complete, _ = _survey([_candidates(at_home(folder))])
    return [each.path for each in complete]


def find_last(root: str | Path, check: Check | None = None, *, rejects_damage: bool = False) -> Path | None:
    """Return the newest complete checkpoint under ``root``; None if there is none.

    The newest checkpoint has the largest commit number (see [Note: commit numbers] in ``record.py``), regardless of the
    clock, the file names and the modification times. Damaged checkpoints that may be newer are skipped with a notice.

    Args:
        root: a checkpoint, a folder of checkpoints, a run folder (it has ``checkpoints/``), or a folder of runs (it has
            ``version_*/checkpoints/``).
        check: function that raises a CheckpointError for complete checkpoints that the caller cannot use.
        rejects_damage: True to raise an error if checkpoints exist but none can be used.

    Raises:
        NoUsableCheckpointError: ``rejects_damage`` is True, and no checkpoint can be used.

    Example:
        >>> path = find_last("runs")
        >>> state = None if path is None else roomier.checkpoint.load(path)
    """
    root = at_home(root)
    complete, damaged = _survey([[root], *map(_candidates, _folders(root))])
    found = None
    while complete and found is None:
        newest = complete.pop()
        try:
            state = fill(read_state(newest.path, newest.record), lambda _, stored: stored.spec)
            if check is not None:
                check(newest.path, state)
            found = newest
        except CheckpointError as error:
            damaged.append((newest.path, error.problem))
    if found is None and damaged and rejects_damage:
        shown = "; ".join(f"{path} ({problem})" for path, problem in damaged[:_NUM_SHOWN])
        problem = f"{len(damaged)} checkpoint(s) exist, but none can be used: {shown}"
        action = "Restore a copy of a checkpoint, or move the damaged checkpoints to another folder"
        raise NoUsableCheckpointError("checkpoint", str(root), problem, action)
    number = 0 if found is None else found.record.commit_number
    for path, problem in damaged:
        if not 0 < read_commit_number(path) < number:
            instead = "there is no other checkpoint" if found is None else f"using {found.path}"
            notice(f"skipped the checkpoint {path} ({problem}); {instead}")
    return None if found is None else found.path


def set_aside_incomplete(folder: Path) -> None:
    """Rename the checkpoints in ``folder`` that lost their records, and print a notice for each. Raises OSError."""
    for path in _candidates(folder):
        if has_lost_record(path):
            set_aside(path)


def next_commit_number(target: Path) -> int:
    """Return a commit number larger than the number of every checkpoint that ``find_last`` may compare with
    ``target``.
    """
    folder = target.parent
    root = folder.parent if folder.name == "checkpoints" else folder
    if root is not folder and root.name.startswith("version_"):
        root = root.parent
    remote = remote_of(root)
    largest = max(_largest_number(root, folder), 0 if remote is None else _largest_in_storage(remote))
    return min(MAX_COMMIT_NUMBER, 1 + largest)


def _largest_number(root: Path, folder: Path) -> int:
    return max(
        (read_commit_number(path) for each in {*_folders(root), folder} for path in _candidates(each)), default=0
    )


@functools.cache  # the newest checkpoint of this process is always in the mirror
def _largest_in_storage(root: RemotePath) -> int:
    return _largest_number(root, root)


def verify(path: str | Path) -> None:
    """Read every byte of the checkpoint ``path`` once and compare the sizes and checksums of its files with its record.

    Raises:
        CheckpointError: a file is missing or damaged. The error names the newest valid checkpoint in the same folder,
            if there is one.
    """
    folder = surviving_path(path)
    with naming_alternative(folder):
        _check(folder)


@contextmanager
def naming_alternative(folder: Path, ranks: Ranks | None = None) -> Iterator[None]:
    """If the ``with`` block raises an error about the damaged checkpoint ``folder``, name the newest valid checkpoint
    next to it in the error. Only rank 0 of ``ranks`` verifies the other checkpoints."""
    try:
        yield
    except (DamagedCheckpointError, NotACheckpointError) as error:
        raise (ranks or Ranks()).on_zero(partial(_with_alternative, error, folder)) from None


def _with_alternative(error: CheckpointError, folder: Path) -> CheckpointError:
    for other in reversed(list_complete(folder.parent)):
        if other == folder:
            continue
        try:
            _check(other)
        except CheckpointError:
            continue
        return type(error)(
            error.field, error.received, error.problem, f"Use {str(other)!r}, the newest valid checkpoint next to it"
        )
    return error


def _check(folder: Path) -> None:
    record = read_record(folder)
    read_state(folder, record)
    check_sizes(folder, record)
    check_sums(folder, record.files)


def _survey(groups: list[list[Path]]) -> tuple[list[_Complete], list[_Damaged]]:
    """Return the complete checkpoints among the candidates in ``groups``, from old to new, and the damaged
    checkpoints."""
    complete: list[_Complete] = []
    damaged: list[_Damaged] = []
    for candidates in groups:
        records: dict[Path, Record] = {}
        for path in candidates:
            try:
                record = read_record(path)
                check_sizes(path, record)
                records[path] = record
            except NotACheckpointError:
                continue
            except (CheckpointError, OSError) as error:
                if path.is_dir() and not path.name.startswith("."):
                    damaged.append((path, str(getattr(error, "problem", error))))
        group_ns = max((each.saved_at_ns for each in records.values()), default=0)
        complete += [_Complete(path, record, group_ns) for path, record in records.items()]
    return sorted(complete, key=lambda each: each.age_key), damaged


def _folders(root: Path) -> list[Path]:
    """Return the checkpoint folders in which :func:`find_last` searches for the newest checkpoint."""
    return [root, root / "checkpoints", *sorted(root.glob("version_*/checkpoints"))]


def _candidates(folder: Path) -> list[Path]:
    try:
        named = [path for path in sorted(folder.iterdir()) if _may_be_checkpoint(path)]
        return [*named, *replaced_in(folder)]
    except OSError:  # the folder does not exist, or is local and cannot be listed
        return []


def _may_be_checkpoint(path: Path) -> bool:
    # A link such as ModelCheckpoint's "last" is a second name of a checkpoint.
    is_other = path.is_symlink() or path.name.startswith(".") or path.name.endswith(SET_ASIDE_SUFFIX)
    return path.is_dir() and not is_other
