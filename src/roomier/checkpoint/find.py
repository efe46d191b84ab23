"""Which checkpoints are there, which is the newest, and is this one whole."""

from dataclasses import dataclass
from pathlib import Path

from roomier.checkpoint.commit import at_home, replaced_in, standing
from roomier.checkpoint.record import (
    DamagedCheckpointError,
    NotACheckpointError,
    Record,
    check_sizes,
    check_sums,
    read_record,
)
from roomier.core.errors import CheckpointError
from roomier.core.log import notice


@dataclass(frozen=True)
class _PassedOver:
    path: Path
    age_key: tuple[int, int]
    problem: str


def list_complete(folder: str | Path) -> list[Path]:
    """The complete checkpoints in ``folder`` itself, the oldest first; an empty list if it does not exist.

    Complete means: the record is whole and every file it lists has its full size. Contents are not read; for
    that there is :func:`verify`. One that a kill caught while it was being replaced is listed under its ``.old-`` name.
    """
    complete, _ = _survey([at_home(folder)])
    return [path for path, _ in complete]


def find_last(root: str | Path) -> Path | None:
    """The complete checkpoint that was committed last under ``root``, or None.

    ``root`` is a checkpoint, a folder of checkpoints, a run folder (it holds ``checkpoints/``), or a folder of
    runs (it holds ``version_*/checkpoints/``). Checkpoints committed at the same time are ordered by
    ``state["progress"]["global_step"]``. Says so when a newer one had to be passed over because it is damaged.
    """
    root = at_home(root)
    folders = [root, root / "checkpoints", *sorted(root.glob("version_*/checkpoints"))]
    complete, damaged = _survey(folders, itself=root)
    newest_key = complete[-1][1].age_key if complete else (-1, -1)
    for passed_over in damaged:
        if passed_over.age_key > newest_key:
            use = f"using {complete[-1][0]}" if complete else "there is no other"
            notice(f"passed over the newer checkpoint {passed_over.path} ({passed_over.problem}); {use}")
    return complete[-1][0] if complete else None


def verify(path: str | Path) -> None:
    """Read every byte of the checkpoint ``path`` once and compare sizes and checksums with its record.

    Raises:
        CheckpointError: it names what is missing or damaged and, where there is one, the newest good
            checkpoint in the same folder.
    """
    folder = standing(Path(path))
    try:
        _check(folder)
    except (DamagedCheckpointError, NotACheckpointError) as error:
        raise with_alternative(error, folder) from None


def with_alternative(error: CheckpointError, folder: Path) -> CheckpointError:
    """``error`` about the checkpoint ``folder``, with the newest good one beside it as the next action."""
    for other in reversed(list_complete(folder.parent)):
        if other == folder:
            continue
        try:
            _check(other)
        except CheckpointError:
            continue
        return type(error)(
            error.field, error.received, error.problem, f"Use {str(other)!r}, the newest good one beside it"
        )
    return error


def _check(folder: Path) -> None:
    record = read_record(folder)
    check_sizes(folder, record)
    check_sums(folder, record.files)


def _survey(folders: list[Path], itself: Path | None = None) -> tuple[list[tuple[Path, Record]], list[_PassedOver]]:
    """The complete checkpoints in ``folders``, from old to new, and the damaged ones."""
    complete: list[tuple[Path, Record]] = []
    damaged: list[_PassedOver] = []
    candidates = [path for folder in folders for path in _candidates(folder)]
    for path in candidates if itself is None else [itself, *candidates]:
        record: Record | None = None
        try:
            record = read_record(path)
            check_sizes(path, record)
            complete.append((path, record))
        except NotACheckpointError:
            continue
        except (CheckpointError, OSError) as error:
            if path.is_dir() and not path.name.startswith("."):
                damaged.append(_PassedOver(path, _age_key(path, record), str(error)))
    return sorted(complete, key=lambda found: found[1].age_key), damaged


def _candidates(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    named = [path for path in sorted(folder.iterdir()) if _may_be_checkpoint(path)]
    return [*named, *replaced_in(folder)]


def _may_be_checkpoint(path: Path) -> bool:
    # A link such as ModelCheckpoint's "last" names a checkpoint a second time.
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _age_key(path: Path, record: Record | None) -> tuple[int, int]:
    return record.age_key if record is not None else (path.stat().st_mtime_ns, -1)
