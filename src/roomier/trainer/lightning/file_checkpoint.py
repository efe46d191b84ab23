"""Single-file checkpoints for ``torch.load`` and Lightning's ``load_from_checkpoint``.

The run is saved as a folder, which is then exported and removed. A killed process therefore leaves either the previous
file or the new file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from roomier import checkpoint
from roomier.checkpoint.commit import at_home
from roomier.core.log import quiet
from roomier.core.paths import check_path
from roomier.export.lightning import export_lightning
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

    For the arguments, see :func:`roomier.train.saving.save.save_checkpoint`.
    """
    check_path("filepath", path)
    target = at_home(path).absolute()
    folder = target.with_name(f".{target.name}.folder")
    then = partial(_convert, run, folder, target, when_committed)
    save_checkpoint(run, folder, weights_only, asynchronous=asynchronous, when_committed=then)


def _convert(run: Run, folder: Path, target: Path, when_committed: Callable[[], None] | None) -> None:
    run.ranks.on_zero(partial(_replace_by_file, folder, target))
    if run.saves.path == folder:
        run.saves.path = target
    if when_committed is not None:
        when_committed()


def _replace_by_file(folder: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.aside")
    aside.unlink(missing_ok=True)
    with quiet():
        export_lightning(folder, aside)
    os.replace(aside, target)
    checkpoint.remove(folder)
