"""Contents of a folder of checkpoints."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from roomier import checkpoint
from roomier.checkpoint.lightning import is_lightning_file
from roomier.core.errors import CheckpointError


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the visible entries in ``folder``, which are checkpoints or possible checkpoints."""
    if not folder.is_dir():
        return ()
    entries = [path for path in folder.iterdir() if not path.is_symlink() and not path.name.startswith(".")]
    return tuple(sorted(path.name for path in entries))


def find_complete(name: str, folders: list[str]) -> str:
    """Return the path of the complete checkpoint ``name`` in the first folder that contains it, or ``""``."""
    for folder in folders if name else ():
        path = os.path.join(folder, name)
        if is_lightning_file(path):  # from the Lightning run that this run resumes
            return path
        with suppress(CheckpointError):
            checkpoint.peek(path)
            return path
    return ""
