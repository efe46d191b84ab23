"""Neptune's service is closed: asking for its logger says so."""

from __future__ import annotations

from typing import Any, NoReturn

from roomier.core.errors import PlanError

_ACTION = "Use one of: comet, csv, jsonl, mlflow, tensorboard, trackio, wandb"


def service_closed() -> PlanError:
    return PlanError("logger", "neptune", "the service was closed in March 2026", _ACTION)


class NeptuneLogger:
    """There is nothing left to log to.

    Raises:
        PlanError: always; it names what to use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse()


def _refuse() -> NoReturn:
    raise service_closed()
