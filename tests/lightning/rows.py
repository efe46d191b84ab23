"""A logger that records rows, and functions that convert rows of both Trainers to one form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roomier import Trainer
from tests.lightning.both import quiet_lightning
from tests.lightning.modules import pl


class Rows(pl.loggers.logger.Logger):
    """Logger that records each row as ``(step, metrics)``."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name, version = "rows", 0

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def as_in_lightning(self) -> list[tuple[int, dict[str, float]]]:
        """Return roomier's rows with Lightning's steps, which count from 0, and without roomier's column ``loss``."""
        rows = [
            (step - ("epoch" in row), {key: each for key, each in row.items() if key != "loss"})
            for step, row in self.rows
        ]
        return [(max(0, step), row) for step, row in rows if row.keys() - {"epoch"}]


def assert_equal_rows(own: Rows, other: Rows) -> None:
    rows = own.as_in_lightning()
    if len(rows) == len(other.rows) + 1:  # roomier also logs the last step if it is not a log step
        last_step, last_row = rows.pop()
        assert last_step == max(step for step, _ in rows)
        assert any(last_row.keys() <= row.keys() for _, row in rows)
    assert [(step, row.keys()) for step, row in rows] == [(step, row.keys()) for step, row in other.rows]
    for (_, row), (_, expected) in zip(rows, other.rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def run_with(kind: Any, call: Any, make: Any, folder: Any, **keywords: Any) -> tuple[Any, Any, Rows]:
    """Return the Trainer, the result of ``call(trainer, module)`` and the rows, for a Trainer of class ``kind``."""
    rows = Rows()
    torch.manual_seed(1)
    module = make()
    quiet = {f"enable_{what}": False for what in ("checkpointing", "progress_bar", "model_summary")}
    given = {"accelerator": "cpu", "logger": rows, "default_root_dir": folder, "max_epochs": 2, **quiet, **keywords}
    trainer = kind(**{"log_every_n_steps": 3, **given})
    if kind is Trainer:
        return trainer, call(trainer, module), rows
    with quiet_lightning():
        return trainer, call(trainer, module), rows
