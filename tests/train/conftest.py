"""What the tests of the loop share: a Trainer that writes and prints nothing unless it is asked to."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from roomier import Logger, Trainer


class Rows(Logger):
    """Keeps the rows of the log: ``(step, metrics)``."""

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


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    def make(**keywords: Any) -> Trainer:
        quiet = {
            "default_root_dir": tmp_path,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**{**quiet, **keywords})

    return make
