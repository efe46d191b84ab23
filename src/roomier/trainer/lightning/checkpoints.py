"""Checkpoints for Lightning: single files for ``torch.load``, and folders in ``load_from_checkpoint`` of its classes.

To write a file, the run is saved as a folder, which is then exported and removed. A killed process therefore leaves
either the previous file or the new file.

[Note: Lightning reads folders]
Scripts written for Lightning call ``Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)``, and
Lightning opens this path as a file. If Lightning is imported, then importing or creating ``roomier.Trainer`` replaces
Lightning's function that opens the file, whereas ``import roomier`` alone does not change Lightning. The replacement
returns the content of a checkpoint folder in Lightning's form, and calls the original function for any other path.
Lightning's code then creates the object, so its arguments and hooks are unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roomier import checkpoint
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.export.lightning_file import export_lightning, lightning_content
from roomier.checkpoint.lightning import was_written_for_lightning
from roomier.checkpoint.record import RECORD_NAME
from roomier.checkpoint.run_state import peek_run
from roomier.core.errors import CheckpointError
from roomier.core.log import quiet
from roomier.core.replacing import replacing_path
from roomier.core.tree import map_tensors
from roomier.storage.mirror import local_of
from roomier.train.saving.remote import upload
from roomier.train.saving.save import save_checkpoint

if TYPE_CHECKING:
    from roomier.run.run import Run


def save_lightning_file(
    run: Run,
    path: str | Path,
    weights_only: bool,
    *,
    asynchronous: bool = False,
    when_committed: Callable[[], None] | None = None,
) -> None:
    """Write a checkpoint to the file ``path``. Every rank must call this function.

    An empty file and an existing checkpoint are replaced. For the arguments, see
    :func:`roomier.train.saving.save.save_checkpoint`.

    Raises:
        CheckpointError: ``path`` exists and is neither an empty file nor a checkpoint.
    """
    target = local_of(at_home(path, "filepath")).absolute()
    run.ranks.on_zero(partial(_refuse_to_overwrite, target))
    folder = target.with_name(f".{target.name}.folder")
    then = partial(_convert, run, folder, target, when_committed)
    save_checkpoint(run, folder, weights_only, asynchronous=asynchronous, when_committed=then)


def saves_file(path: str | Path, callbacks: Iterable[Any]) -> bool:
    """Return True if a checkpoint is saved as a file by default: if ``path`` is a file, such as a temporary file, or if
    a ModelCheckpoint in ``callbacks`` saves files."""
    return local_of(at_home(path, "filepath")).is_file() or any(
        getattr(each, "format", None) == "lightning" for each in callbacks
    )


def _refuse_to_overwrite(target: Path) -> None:
    is_file = target.is_file() and (not target.stat().st_size or was_written_for_lightning(target))
    if os.path.lexists(target) and not (is_file or (target / RECORD_NAME).is_file()):
        problem = "exists, and is neither an empty file nor a checkpoint"
        raise CheckpointError("filepath", str(target), problem, "Choose another path, or move the file or folder")


def _convert(run: Run, folder: Path, target: Path, when_committed: Callable[[], None] | None) -> None:
    run.ranks.on_zero(partial(_replace_by_file, folder, target))
    if run.saves.path == folder:
        run.saves.path = target
    upload(run, target)
    if when_committed is not None:
        when_committed()


def _replace_by_file(folder: Path, target: Path) -> None:
    former = target.with_name(f".{target.name}.former")
    with replacing_path(target) as aside:
        with quiet():
            export_lightning(folder, aside)
        if target.is_dir():
            target.rename(former)
    if former.is_dir():
        checkpoint.remove(former)
    checkpoint.remove(folder)


_FILES = ("lightning.pytorch.core.saving", "pytorch_lightning.core.saving")
_NAME = "pl_load"


def let_lightning_read_folders() -> None:
    """Enable ``load_from_checkpoint`` of LightningModule and LightningDataModule to read checkpoint folders.

    See [Note: Lightning reads folders]. This function has no effect if Lightning is not imported.
    """
    for name in _FILES:
        file: Any = sys.modules.get(name)
        read = getattr(file, _NAME, None)
        if callable(read) and not isinstance(read, partial):
            setattr(file, _NAME, partial(_read, read))


def _read(read: Callable[..., Any], path: Any, map_location: Any = None, **options: Any) -> Any:
    if not isinstance(path, str | Path) or not (at_home(path) / RECORD_NAME).is_file():
        return read(path, map_location=map_location, **options)
    content = lightning_content(at_home(path), peek_run(at_home(path)))
    if not isinstance(map_location, str | torch.device):  # a function or dict as map_location applies only to files
        return content
    return map_tensors(lambda tensor: tensor.to(map_location), content)
