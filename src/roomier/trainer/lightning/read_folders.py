"""Support for roomier's checkpoint folders in ``load_from_checkpoint`` of Lightning's classes.

[Note: Lightning reads folders]
Scripts written for Lightning call ``Model.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)``, and
Lightning opens this path as a file. If Lightning is imported, then importing or creating ``roomier.Trainer`` replaces
Lightning's function that opens the file. ``import roomier`` alone does not change Lightning. The replacement returns
the content of a checkpoint folder in Lightning's form, and calls Lightning's function for any other path. Lightning's
code then creates the object, so its arguments and hooks are unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roomier.checkpoint.commit import at_home
from roomier.checkpoint.export.lightning_file import lightning_content
from roomier.checkpoint.record import RECORD_NAME
from roomier.checkpoint.run_state import peek_run
from roomier.core.tree import map_tensors

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
