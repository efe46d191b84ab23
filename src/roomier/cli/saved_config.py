"""The configuration of a run, kept in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roomier.api.callback import Callback

FILE_NAME = "config.yaml"


class SavedConfig(Callback):
    """Writes ``config.yaml`` into the run folder: ``roomier fit --config`` on it does the same run again.

    A resumed run goes on in its folder. Where it was started with other settings, they are written beside the first
    ones, as ``config-step=N.yaml``.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.keeps_files or not trainer.is_global_zero:
            return
        path = Path(trainer.log_dir) / FILE_NAME
        if path.exists() and path.read_text() != self._text:
            path = path.with_stem(f"config-step={trainer.global_step}")
        path.write_text(self._text)
