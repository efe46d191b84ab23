"""Functions that list, name, find and remove the checkpoints in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from roomier import checkpoint
from roomier.callbacks.checkpoint_name import first_free_name
from roomier.checkpoint.commit import names_being_written
from roomier.checkpoint.lightning import is_lightning_file
from roomier.checkpoint.record import RECORD_NAME
from roomier.core.errors import CheckpointError


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the entries in ``folder``, without links and hidden entries."""
    if not folder.is_dir():
        return ()
    entries = [path for path in folder.iterdir() if not path.is_symlink() and not path.name.startswith(".")]
    return tuple(sorted(path.name for path in entries))


def choose_name(
    folder: Path, name: str, kept: set[str], own: set[str], foreign: Iterable[str], suffix: str = ""
) -> tuple[str, tuple[str, ...]]:
    """Choose the name of the next checkpoint in ``folder`` and add this name to ``own``.

    Args:
        name: name to use if it is free.
        kept: names that this run must not replace.
        own: names that this run can replace.
        foreign: known checkpoint names of other runs.
        suffix: suffix of the name of a checkpoint file; empty for a checkpoint folder.

    Returns:
        A pair: the chosen name (``name``, or the first free name of ``name-v1``, ``name-v2``, ...), and the names of
            all checkpoints of other runs.
    """
    complete = {each for each in names_in(folder) if each not in own and _is_checkpoint(folder / each)}
    others = names_being_written(folder).union(complete).difference(own, kept).union(foreign)
    chosen = first_free_name(name, kept | others, suffix)
    own.add(chosen)
    return chosen, tuple(sorted(others))


def _is_checkpoint(path: Path) -> bool:
    return (path / RECORD_NAME).is_file() or is_lightning_file(path)


def remove_saved(path: str, *, is_file: bool) -> None:
    """Remove the checkpoint folder ``path`` if it exists, or the checkpoint file ``path`` if ``is_file`` is True.

    Raises:
        CheckpointError: the folder cannot be removed.
        OSError: the file cannot be removed.
    """
    if os.path.isdir(path):
        checkpoint.remove(path)
    elif is_file and os.path.isfile(path):
        os.unlink(path)


def find_complete(name: str, folders: list[str]) -> str:
    """Return the path of the complete checkpoint ``name`` in the first folder that contains it; ``""`` if none does."""
    for folder in folders if name else ():
        path = os.path.join(folder, name)
        if os.path.islink(path):  # the link "last", which other checkpoints may replace
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        if is_lightning_file(path):  # a single file, which peek does not support
            return path
        with suppress(CheckpointError):
            checkpoint.peek(path)
            return path
    return ""
