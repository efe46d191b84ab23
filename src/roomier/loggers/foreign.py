"""Loggers written for Lightning, taken by what they can do; Lightning is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.api.logger import Logger

_METHODS = ("log_metrics", "log_hyperparams", "finalize")
_STATUSES = {"interrupted": "failed"}  # what Lightning calls it, and what services take


def is_logger(obj: object) -> bool:
    """Whether ``obj`` is a logger of roomier, or has the methods of one of Lightning."""
    if isinstance(obj, type):
        return False
    return isinstance(obj, Logger) or all(callable(getattr(obj, name, None)) for name in _METHODS)


class ForeignLogger(Logger):
    """``inner``, called as Lightning calls it. ``trainer.logger`` is ``inner`` itself.

    It keeps its own folders and versions: a resumed run goes on in what it opens then, and rows of steps that are
    written again stand there twice.
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
