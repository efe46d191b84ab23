"""Creates the loggers of a run from ``Trainer(logger=...)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from roomier.api.logger import Logger, Nothing
from roomier.core.errors import PlanError, did_you_mean
from roomier.core.extensions import load_extensions
from roomier.loggers.comet import CometLogger
from roomier.loggers.files import CSVLogger, FileLogger, JSONLLogger
from roomier.loggers.group import is_logger
from roomier.loggers.mlflow import MLFlowLogger
from roomier.loggers.tensorboard import TensorBoardLogger
from roomier.loggers.trackio import TrackioLogger
from roomier.loggers.wandb import WandbLogger


def service_closed() -> PlanError:
    """Return the error that lists the available loggers."""
    action = f"Use one of: {', '.join(sorted(LOGGERS))}"
    return PlanError("logger", "neptune", "the service was shut down in March 2026", action)


class NeptuneLogger:
    """Placeholder for a Neptune logger. The Neptune service was shut down.

    Raises:
        PlanError: always raised, with a list of the available loggers.

    Example:
        >>> NeptuneLogger()  # raises PlanError
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise service_closed()


class SilentLogger(Logger):
    """Logger that accepts all calls but has no effect, for fast_dev_run and for trials of the tuner."""

    name = "silent"

    @property
    def experiment(self) -> Any:
        return Nothing()

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    def log_image(self, *args: Any, **kwargs: Any) -> None:
        pass

    log_figure = log_histogram = log_image

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


_OWN: list[Any] = [JSONLLogger, CSVLogger, TensorBoardLogger, WandbLogger, CometLogger, MLFlowLogger, TrackioLogger]
LOGGERS: dict[str, Callable[[], Logger]] = {each.name: each for each in _OWN}
"""Functions that create a logger, by name. An extension can add entries (see ``roomier.core.extensions``)."""


def loggers_from_flag(flag: bool | str | Logger | Iterable[Any] | None, *, is_dev_run: bool = False) -> list[Any]:
    """Return the loggers for ``True``, ``False``, a name, a logger, or several names and loggers.

    - ``True`` selects ``[JSONLLogger(), CSVLogger()]``.
    - ``False``, ``None`` and an empty list select no logger.
    - For any other value, the two loggers of ``True`` are added, unless the value includes at least one of them. For
      example, ``"tensorboard"`` selects TensorBoard and both file loggers, ``["tensorboard", "csv"]`` selects exactly
      these two loggers, and ``"csv"`` selects one file logger.

    Loggers written for Lightning are used unchanged.

    Args:
        is_dev_run: if True, replace all loggers with a :class:`~roomier.loggers.by_name.SilentLogger`.

    Raises:
        PlanError: a name is unknown, a value is not a logger, or two loggers would write the same file.
        RoomierError: a named logger requires a package that is not installed.

    Example:
        >>> [logger.name for logger in loggers_from_flag(True)]
        ['jsonl', 'csv']
    """
    if flag is None or flag is False:
        return []
    if is_dev_run:
        return [SilentLogger()] if flag else []
    if flag is True:
        return [JSONLLogger(), CSVLogger()]
    if isinstance(flag, str) or is_logger(flag):
        flag = [flag]
    if not isinstance(flag, Iterable):
        raise _not_a_logger(flag)
    loggers = [_one(item) for item in flag]
    if loggers and not any(isinstance(logger, FileLogger) for logger in loggers):
        added = [JSONLLogger(), CSVLogger()]
        for each in added:
            each.is_added = True
        loggers += added
    for kind in (JSONLLogger, CSVLogger):
        if sum(isinstance(logger, kind) and logger.is_in_run_folder for logger in loggers) > 1:
            problem = f"two of these loggers would write {kind.file_name}"
            raise PlanError("logger", [logger.name for logger in loggers], problem, f"Use {kind.name!r} only once")
    return loggers


def _one(item: object) -> Any:
    if not isinstance(item, str):
        if not is_logger(item):
            raise _not_a_logger(item)
        return item
    if item not in LOGGERS:
        load_extensions()
    if item in LOGGERS:
        return LOGGERS[item]()
    if item == "neptune":
        raise service_closed()
    raise PlanError("logger", item, "is not the name of a logger", did_you_mean(item, LOGGERS))


def _not_a_logger(item: object) -> PlanError:
    problem = "must be a name or a logger"
    return PlanError("logger", item, problem, "Pass True, False, a name, a logger, or a list of names and loggers")
