"""Base class of roomier's loggers, which users may call directly and whose errors do not end a run."""

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from roomier.api.logger import Logger
from roomier.core.errors import RoomierError
from roomier.core.log import is_first_rank, notice
from roomier.core.metric_names import check_metric_name


class GuardedLogger(Logger):
    """Base class of loggers that modules and callbacks may also call directly, on any rank.

    Calls have no effect on ranks other than the first rank, or after the logger has failed.

    Args:
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
    """

    def __init__(self, prefix: str | None = "") -> None:
        self._prefix = f"{prefix}-" if prefix else ""
        self._last_step = 0

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write one row.

        Args:
            metrics: numbers and 0-dim tensors. Reading a tensor on a device synchronizes the host with the device.
            step: step of the row; None uses the step of the previous row.

        Raises:
            RoomierError: a value is not a number, or a name contains control characters.
        """
        if self.is_silent:
            return
        for name in metrics:
            check_metric_name("log_metrics", str(name))
        row = {f"{self._prefix}{name}": _number(name, value) for name, value in metrics.items()}
        self._last_step = step = self._last_step if step is None else int(step)
        self._guard("log_metrics", lambda: self._write_metrics(row, step))

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write the hyperparameters of the run."""
        if self.is_silent:
            return
        given = dict(vars(params) if isinstance(params, Namespace) else params)
        self._guard("log_hyperparams", lambda: self._write_hyperparams(given))

    @property
    def is_silent(self) -> bool:
        """True if the logger does not write, because the logger failed or another rank writes."""
        return self.is_muted or not is_first_rank()

    @abstractmethod
    def _write_metrics(self, row: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def _write_hyperparams(self, params: dict[str, Any]) -> None: ...

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            mute(self, name, error)


def mute(logger: Any, method: str, error: Exception) -> None:
    """Disable ``logger`` and print a notice with the error."""
    logger.is_muted = True
    name = getattr(logger, "name", None)
    notice(
        f"logger {name!r} ({type(logger).__name__}) failed in {method} and is disabled; training continues. "
        f"{type(error).__name__}: {error}"
    )


def flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested ``params``: ``{"model": {"depth": 2}}`` gives ``("model/depth", 2)``.

    Values other than numbers and strings are converted to strings.
    """
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value if isinstance(value, (bool, int, float, str)) else str(value)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoomierError("log_metrics", (name, value), "must be a number", "Pass numbers or 0-dim tensors") from error
