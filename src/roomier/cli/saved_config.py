"""Callback that stores the configuration of a run in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roomier.api.callback import Callback
from roomier.core.replacing import replacing
from roomier.core.untrusted import read_text

FILE_NAME = "config.yaml"


class SavedConfig(Callback):
    """Callback that writes ``config.yaml`` to the run folder. ``roomier fit --config`` repeats the run with this file.

    A resumed run uses the same folder. If the settings of the resumed run differ, they are written to
    ``config-step=N.yaml`` instead.

    Args:
        text: content of the file.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.keeps_files or not trainer.is_global_zero:
            return
        path = Path(trainer.log_dir) / FILE_NAME
        if path.exists() and read_text(path) != self._text:
            path = path.with_stem(f"config-step={trainer.global_step}")
        with replacing(path) as file:
            file.write(self._text)
