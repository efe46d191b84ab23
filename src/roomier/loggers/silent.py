"""SilentLogger: the value of ``self.logger`` of a module in a run that writes no files."""

from __future__ import annotations

from typing import Any

from roomier.api.logger import Logger, Nothing


class SilentLogger(Logger):
    """Logger that accepts all calls but has no effect, for fast_dev_run and for trials of the tuner."""

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
