"""SilentLogger: what a module finds as ``self.logger`` in a run that writes nothing."""

from __future__ import annotations

from typing import Any

from roomier.api.logger import Logger, Nothing


class SilentLogger(Logger):
    """Takes everything, keeps nothing: for fast development runs, and for trials of the tuner."""

    name = "silent"

    @property
    def experiment(self) -> Any:
        return Nothing()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()
