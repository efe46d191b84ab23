"""Fixture for the tests of the loop: a logger that stores its rows."""

from collections.abc import Mapping

import pytest

from roomier import Logger


class Rows(Logger):
    """Logger that stores the rows of the log as ``(step, metrics)``."""

    name = "rows"

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def column(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.rows if name in metrics]

    def steps(self, name: str) -> list[int]:
        return [step for step, metrics in self.rows if name in metrics]


@pytest.fixture
def rows() -> Rows:
    return Rows()
