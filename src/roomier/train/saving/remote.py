"""Remote storage of a run: the checks before it starts, its uploads, and the files of a run that resumes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roomier.callbacks import ModelCheckpoint
from roomier.checkpoint.uploads import Uploads, check_storage
from roomier.core.ranks import Ranks
from roomier.run.run import Run
from roomier.run.settled import Request, Start
from roomier.storage.mirror import remote_of


def open_uploads(request: Request, start: Start, ranks: Ranks, callbacks: Iterable[Any]) -> Uploads | None:
    """Return the uploads of a call, or None if it writes nothing to remote storage.

    Raises:
        CheckpointError: a folder of a ModelCheckpoint is an address to which the ranks cannot write.
    """
    saving = [each for each in callbacks if isinstance(each, ModelCheckpoint) and each.dirpath is not None]
    own = {f"{type(each).__name__}(dirpath)": str(each.dirpath) for each in saving if request.is_fit}
    given = {name: path for name, path in own.items() if start.folder is None or Path(path).parent != start.folder}
    check_storage(given, ranks)
    folders: list[str | Path] = [*own.values()]
    if start.folder is not None:
        folders += [start.folder, start.folder / "checkpoints"]
    if not any(remote_of(each) for each in folders):
        return None
    return Uploads(ranks, start.folder, folders, request.options.upload_errors)


def upload(run: Run, path: Path) -> None:
    """Upload the complete checkpoint ``path`` if it is in a mirror. Every rank must call this function.

    Raises:
        CheckpointError: an earlier upload failed and errors are raised, or the run has ended and this upload failed.
    """
    target = remote_of(path)
    if target is None:
        return
    if run.uploads is not None:
        run.uploads.add(path, target)
        return
    uploads = Uploads(run.ranks, None, (), "raise")
    uploads.add(path, target)
    uploads.end(is_complete=True)
