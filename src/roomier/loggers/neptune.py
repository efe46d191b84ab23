"""NeptuneLogger: placeholder that raises an error, because the Neptune service was shut down."""

from __future__ import annotations

from typing import Any

from roomier.core.errors import PlanError

_ACTION = "Use one of: comet, csv, jsonl, mlflow, tensorboard, trackio, wandb"


def service_closed() -> PlanError:
    """Return the error that lists the available loggers."""
    return PlanError("logger", "neptune", "the service was shut down in March 2026", _ACTION)


class NeptuneLogger:
    """Placeholder for a Neptune logger. The Neptune service was shut down.

    Raises:
        PlanError: always raised, with a list of the available loggers.

    Example:
        >>> NeptuneLogger()  # raises PlanError
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise service_closed()
