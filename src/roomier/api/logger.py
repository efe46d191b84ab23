"""Logger: where the numbers of a run go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Logger(ABC):
    """Implement :meth:`log_metrics`; the rest is optional.

    The Trainer calls ``start`` once, ``log_metrics`` at log steps with plain floats, and ``finalize`` once.
    """

    name: str = "logger"

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open what is written to. ``resumed_step``: rows after this step come from a run that was cut off
        and will be written again; drop them."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one row. ``step`` counts optimizer steps."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyperparameters of the run, once, at its start."""

    def finalize(self, status: str) -> None:
        """Close. ``status``: ``"success"``, ``"interrupted"`` or ``"failed"``."""
