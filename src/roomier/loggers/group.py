"""LoggerGroup: group of loggers, which disables a logger that fails. Loggers written for Lightning are recognized by
their methods, without importing Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from roomier.api.logger import STEP_COLUMN, Logger
from roomier.loggers.files import FileLogger
from roomier.loggers.guarded import mute
from roomier.loggers.visuals import visuals_of

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

    def log_image(
        self, key: str, images: Any, step: int | None = None, *, caption: str | Sequence[str] | None = None
    ) -> None:
        visuals_of(self.inner, self.name).images(key, images, caption or (), step or 0)

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        visuals_of(self.inner, self.name).figure(key, figure, step or 0)

    def log_histogram(
        self, key: str, values: Any, step: int | None = None, *, bins: int | Sequence[float] = 64
    ) -> None:
        visuals_of(self.inner, self.name).histogram(key, values, step or 0)

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


class LoggerGroup:
    """Group that passes each call to all its loggers in order. A failing logger does not end the run.

    The error of a logger is printed to standard error, and the logger is no longer called, except for ``finalize``,
    which releases its resources.

    Args:
        loggers: loggers of roomier, or loggers written for Lightning; see
            :class:`roomier.loggers.group.ForeignLogger`.

    Attributes:
        loggers: the loggers. Loggers written for Lightning are wrapped.

    Example:
        >>> group = LoggerGroup([JSONLLogger(), CSVLogger()])
        >>> group.start(Path("run"))
        >>> group.log_metrics({"loss": 0.5}, step=1)
    """

    def __init__(self, loggers: Iterable[Any]) -> None:
        self.loggers: list[Logger] = [each if isinstance(each, Logger) else ForeignLogger(each) for each in loggers]

    def __iter__(self) -> Iterator[Logger]:
        return iter(self.loggers)

    def __len__(self) -> int:
        return len(self.loggers)

    @property
    def muted(self) -> list[Logger]:
        """Loggers that failed and are no longer called."""
        return [each for each in self.loggers if each.is_muted]

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Start all loggers. See :meth:`roomier.api.logger.Logger.start`."""
        set_run_folder(self.loggers, run_dir)
        for logger in self.loggers:
            logger.is_muted = False
        self._each("start", lambda logger: logger.start(run_dir, resumed_step))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row of metrics with all loggers. Each logger receives a separate copy."""
        self._each("log_metrics", lambda logger: logger.log_metrics(dict(metrics), step))

    def log_evaluated_batch(self, metrics: Mapping[str, float], index: int, step: int) -> None:
        """Log the row of one evaluation batch with all loggers.

        Args:
            metrics: values by column.
            index: index of the batch, which is the step of the row.
            step: number of completed optimizer steps. Loggers of roomier receive this number as the metric
                ``trainer/step``, so that a resumed run can find and remove later rows.
        """

        def log(logger: Logger) -> None:
            added = {} if isinstance(logger, ForeignLogger) else {STEP_COLUMN: step}
            logger.log_metrics({**metrics, **added}, index)

        self._each("log_metrics", log)

    def show(self, method: str, key: str, value: Any, step: int, **options: Any) -> None:
        """Call ``method`` of all loggers: ``"log_image"``, ``"log_figure"`` or ``"log_histogram"``. If several file
        loggers share a folder, only the first one writes."""
        folders = set[str | None]()

        def show(logger: Logger) -> None:
            if isinstance(logger, FileLogger):
                if logger.log_dir in folders:
                    return
                folders.add(logger.log_dir)
            getattr(logger, method)(key, value, step, **options)

        self._each(method, show)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the hyperparameters with all loggers. Each logger receives a separate copy."""
        self._each("log_hyperparams", lambda logger: logger.log_hyperparams(dict(params)))

    def finalize(self, status: str) -> None:
        """Finalize all loggers, including loggers that failed."""
        for logger in [each for each in self.loggers if each.is_muted]:
            with suppress(Exception):  # the first failure was already printed
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


def choosing_their_folders(loggers: Iterable[Any]) -> tuple[Any, ...]:
    """Return the loggers written for Lightning. These loggers choose their own folders, so they can log without a run
    folder.
    """
    return tuple(each for each in loggers if not isinstance(each, Logger))


def takes(loggers: Iterable[Any], method: str) -> bool:
    """Return True if one of ``loggers`` implements ``method``, such as ``"log_image"``. Disabled loggers count, so the
    result is equal on all ranks."""
    return any(
        not isinstance(each, Logger) or getattr(type(each), method) is not getattr(Logger, method) for each in loggers
    )


def set_run_folder(loggers: Iterable[Any], run_dir: Path | None) -> None:
    """Set the run folder of roomier's loggers. Every rank must call this method, but only the first rank starts the
    loggers."""
    for logger in loggers:
        if isinstance(logger, Logger):
            logger.run_dir = run_dir
