"""Support for loggers that were written for Lightning. Such loggers are recognized by their methods, without importing
Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.api.logger import Logger

_METHODS = ("log_metrics", "log_hyperparams", "finalize")
_STATUSES = {"interrupted": "failed"}  # Lightning's value, which tracking services accept


def is_logger(obj: object) -> bool:
    """Return True if ``obj`` is a logger of roomier, or has the methods of a Lightning logger."""
    if isinstance(obj, type):
        return False
    return isinstance(obj, Logger) or all(callable(getattr(obj, name, None)) for name in _METHODS)


class ForeignLogger(Logger):
    """Adapter that calls a Lightning logger in the same way as Lightning's Trainer. ``trainer.logger`` returns
    ``inner``.

    ``inner`` manages its own folders and versions. After a resume, ``inner`` contains the rows of repeated steps
    twice.

    Args:
        inner: the Lightning logger.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.name = f"{type(inner).__module__.partition('.')[0]} {type(inner).__name__}"

    @property
    def experiment(self) -> Any:
        return getattr(self.inner, "experiment", None)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.inner.log_metrics(dict(metrics), step)
        self.save()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        if params:
            self.inner.log_hyperparams(dict(params))
            self.save()

    def save(self) -> None:
        save = getattr(self.inner, "save", None)
        if callable(save):
            save()

    def finalize(self, status: str) -> None:
        self.inner.finalize(_STATUSES.get(status, status))
