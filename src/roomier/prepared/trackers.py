"""Trackers of an Accelerator, which are loggers of roomier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roomier.api.logger import Logger, Nothing
from roomier.core.errors import PlanError, RoomierError
from roomier.loggers.by_name import loggers_from_flag
from roomier.loggers.foreign import is_logger
from roomier.loggers.group import LoggerGroup

_NAMES = {"comet_ml": "comet"}


class Trackers:
    """Loggers that :meth:`start` starts on rank 0.

    Args:
        log_with: a name, a logger, or a list of them. None for no logger.
        folder: parent folder of the log files; None for the current folder.

    Raises:
        PlanError: a name is unknown.
        RoomierError: a named logger requires a package that is not installed.
    """

    def __init__(self, log_with: Any, folder: Path | None) -> None:
        given = log_with if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
        self._loggers = loggers_from_flag([_logger_of(each) for each in given])
        self._folder = folder
        self._group = LoggerGroup([])
        self._num_logged = 0

    @property
    def started(self) -> Sequence[Logger]:
        """Loggers that were started on this rank."""
        return self._group.loggers

    def start(self, project: str, config: Mapping[str, Any] | None) -> None:
        """Start the loggers in the subfolder ``project``, and log ``config`` as hyperparameters."""
        self._group = LoggerGroup(self._loggers)
        if self._loggers:
            folder = (self._folder or Path()) / project
            folder.mkdir(parents=True, exist_ok=True)
            self._group.start(folder)
        if config is not None:
            self._group.log_hyperparams(config)

    def log(self, values: Mapping[str, Any], step: int | None) -> None:
        """Log numbers. If ``step`` is None, each call uses the next step.

        Raises:
            RoomierError: a value is not a number.
        """
        step = self._num_logged if step is None else step
        self._num_logged = step + 1
        self._group.log_metrics({name: _number(name, each) for name, each in values.items()}, step)

    def named(self, name: str) -> Logger:
        """Return the started logger with the name ``name`` in Accelerate or roomier.

        Raises:
            RoomierError: no logger has this name.
        """
        found = [each for each in self.started if each.name == _NAMES.get(name, name)]
        if not found:
            names = [each.name for each in self.started]
            raise RoomierError("name", name, f"is not one of the started loggers {names}", "Add it to log_with")
        return found[0]

    def finish(self) -> None:
        """Close all loggers."""
        self._group.finalize("success")


def _logger_of(given: Any) -> Any:
    if is_logger(given):
        return given
    name = str(getattr(given, "value", given))
    if name == "all":
        raise PlanError("log_with", name, "is ambiguous", "Use log_with=['tensorboard', 'wandb']")
    return _NAMES.get(name, name)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        action = "Pass numbers, or pass strings in the argument 'config' of init_trackers"
        raise RoomierError("values", {name: value}, "contains a value that is not a number", action) from error


NO_TRACKER = Nothing()
"""Tracker that ignores all calls, for all ranks except rank 0."""
