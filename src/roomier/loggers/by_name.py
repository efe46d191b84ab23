"""``Trainer(logger=...)`` -> the loggers of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from roomier.api.logger import Logger
from roomier.core.errors import PlanError, did_you_mean
from roomier.loggers.csv import CSVLogger
from roomier.loggers.jsonl import JSONLLogger
from roomier.loggers.tensorboard import TensorBoardLogger

_BY_NAME: dict[str, Callable[[], Logger]] = {
    "jsonl": JSONLLogger,
    "csv": CSVLogger,
    "tensorboard": TensorBoardLogger,
}
_NOT_BUILT = ("comet", "mlflow", "trackio", "wandb")


def loggers_from_flag(flag: bool | str | Logger | Iterable[str | Logger] | None) -> list[Logger]:
    """The loggers for ``True``, ``False``, a name, a ``Logger``, or several names and loggers.

    ``True`` is ``[JSONLLogger(), CSVLogger()]``; ``False``, ``None`` and an empty list are none. Every other
    run keeps both files too, after what was asked for, unless it names which of the two it wants:
    ``"tensorboard"`` is TensorBoard and the two files, ``["tensorboard", "csv"]`` is exactly these, ``"csv"``
    is the one file.

    Raises:
        PlanError: a name is unknown or not built yet, something is not a logger, or a file would have two writers.
        RoomierError: a named logger needs a package that is not installed.
    """
    if flag is None or flag is False:
        return []
    if flag is True:
        return [JSONLLogger(), CSVLogger()]
    if isinstance(flag, (str, Logger)):
        flag = [flag]
    if not isinstance(flag, Iterable):
        raise _not_a_logger(flag)
    loggers = [_one(item) for item in flag]
    if loggers and not any(isinstance(logger, (JSONLLogger, CSVLogger)) for logger in loggers):
        loggers += [JSONLLogger(), CSVLogger()]
    for kind in (JSONLLogger, CSVLogger):
        if sum(isinstance(logger, kind) for logger in loggers) > 1:
            raise PlanError(
                "logger",
                [logger.name for logger in loggers],
                f"{kind.file_name} would have two writers",
                f"Name {kind.name!r} once",
            )
    return loggers


def _one(item: object) -> Logger:
    if isinstance(item, Logger):
        return item
    if not isinstance(item, str):
        raise _not_a_logger(item)
    if item in _BY_NAME:
        return _BY_NAME[item]()
    if item in _NOT_BUILT:
        raise PlanError(
            "logger",
            item,
            "is not built yet",
            "Use 'tensorboard' or 'csv', or pass an object of your own subclass of roomier.api.logger.Logger",
        )
    if item == "neptune":
        raise PlanError("logger", item, "the service was closed in March 2026", "Use one of: csv, jsonl, tensorboard")
    raise PlanError("logger", item, "there is no logger of this name", did_you_mean(item, _BY_NAME))


def _not_a_logger(item: object) -> PlanError:
    return PlanError(
        "logger",
        item,
        "is neither a name nor a Logger",
        "Pass True, False, a name, a Logger, or a list of names and loggers",
    )
