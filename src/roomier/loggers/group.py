"""LoggerGroup: several loggers as one, none of which can end a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from roomier.api.logger import Logger
from roomier.loggers.foreign import ForeignLogger
from roomier.loggers.guarded import mute


class LoggerGroup:
    """Passes every call on to each of ``loggers``, in order.

    Hours of training are worth more than their curve: a logger that raises is named once on standard error,
    with its error, and left out from then on. It is still told to ``finalize``, so that it can close what it
    holds.

    Args:
        loggers: also those written for Lightning, see :class:`roomier.loggers.foreign.ForeignLogger`.
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        self.loggers: list[Logger] = [each if isinstance(each, Logger) else ForeignLogger(each) for each in loggers]

    def __iter__(self) -> Iterator[Logger]:
        return iter(self.loggers)

    def __len__(self) -> int:
        return len(self.loggers)

    @property
    def muted(self) -> list[Logger]:
        return [each for each in self.loggers if each.is_muted]

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        tell_folder(self.loggers, run_dir)
        for logger in self.loggers:
            logger.is_muted = False
        self._each("start", lambda logger: logger.start(run_dir, resumed_step))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._each("log_metrics", lambda logger: logger.log_metrics(dict(metrics), step))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._each("log_hyperparams", lambda logger: logger.log_hyperparams(dict(params)))

    def finalize(self, status: str) -> None:
        for logger in self.muted:
            with suppress(Exception):  # it was named when it first failed
                logger.finalize(status)
        self._each("finalize", lambda logger: logger.finalize(status))

    def _each(self, name: str, call: Callable[[Logger], None]) -> None:
        for logger in self.loggers:
            if logger.is_muted:
                continue
            try:
                call(logger)
            except Exception as error:
                mute(logger, name, error)


def tell_folder(loggers: Iterable[Any], run_dir: Path | None) -> None:
    """Let roomier's loggers know the folder of the run: on every rank, while only the first starts them."""
    for logger in loggers:
        if isinstance(logger, Logger):
            logger.run_dir = run_dir
