"""Direct calls of loggers from modules and callbacks, on any rank."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import roomier
from roomier.core.errors import RoomierError
from roomier.loggers import CSVLogger, JSONLLogger, Logger
from tests.loggers.conftest import Line


def json_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tensors_missing_step_and_prefix(tmp_path: Path) -> None:
    logger = JSONLLogger(prefix="run")
    logger.start(tmp_path)
    logger.log_metrics({"a": torch.tensor(2.0)}, step=torch.tensor(4))
    logger.log_metrics({"b": 1})
    logger.log_hyperparams(Namespace(lr=0.5))
    logger.finalize("success")
    assert [(row["step"], row.get("run-a"), row.get("run-b")) for row in json_rows(tmp_path)] == [
        (4, 2.0, None),
        (4, None, 1.0),
    ]
    assert json.loads((tmp_path / "hparams.json").read_text()) == {"lr": 0.5}


def test_metric_must_be_a_number(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    with pytest.raises(RoomierError, match=r"log_metrics=.*acc.*must be a number"):
        logger.log_metrics({"acc": torch.zeros(3)}, 1)
    logger.finalize("failed")


def test_other_ranks_do_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    for logger in (JSONLLogger(), CSVLogger()):
        logger.log_metrics({"a": torch.zeros(3)}, 1)
        logger.log_hyperparams({"lr": 1})
        logger.experiment.add_image("x", None)
    assert not list(tmp_path.iterdir())


def test_logger_that_fails_in_a_direct_call_is_disabled(tmp_path: Path, capsys) -> None:
    logger = CSVLogger()
    for step in (1, 2):
        logger.log_metrics({"a": 1.0}, step)  # not started
    assert capsys.readouterr().err.count("logger 'csv' (CSVLogger) failed in log_metrics and is disabled") == 1


def test_missing_experiment_ignores_calls_and_prints_one_notice(capsys) -> None:
    logger = JSONLLogger()
    for _ in range(2):
        logger.experiment.add_image("x", None)[0].more().and_more = 3
    err = capsys.readouterr().err
    problem = "logger 'jsonl' supports only numbers and hyperparameters: calls of its experiment are ignored"
    assert err.count(f"{problem}, such as add_image()") == 1


def test_modules_can_access_every_logger(make_trainer, loader, tmp_path: Path) -> None:
    class LogsDirectly(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.log_metrics({"own": batch_idx}, step=self.global_step)
            self.logger.experiment.add_scalar("more", 1.0, self.global_step)
            for logger in self.loggers:
                assert logger.log_dir == str(tmp_path / "version_0") == self.trainer.log_dir
                assert (logger.save_dir, logger.version) == (str(tmp_path), "version_0")
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(logger=["tensorboard", "jsonl"], max_steps=2, log_every_n_steps=1)
    trainer.fit(LogsDirectly(), loader)
    from tests.loggers.test_tensorboard_logger import points

    assert points(tmp_path / "version_0", "own") == [(0, 0.0), (1, 1.0)]
    assert points(tmp_path / "version_0", "more") == [(0, 1.0), (1, 1.0)]


def test_fast_dev_run_has_silent_loggers(make_trainer, loader, tmp_path: Path) -> None:
    class LogsDirectly(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.log_metrics({"own": 1.0}, step=0)
            self.logger.experiment.add_scalar("more", 1.0, 0)
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(logger="tensorboard", fast_dev_run=True)
    trainer.fit(LogsDirectly(), loader)
    assert not list(tmp_path.iterdir())
    assert make_trainer(logger=False, fast_dev_run=True).logger is None


class OnlyRows(Logger):
    """Logger with only the required method."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.rows.append((step, dict(metrics)))


def test_minimal_logger(make_trainer, line, loader) -> None:
    own = OnlyRows()
    trainer = make_trainer(logger=own, max_steps=1, log_every_n_steps=1)
    trainer.fit(line, loader)
    trainer.test(line, loader)
    assert trainer.logger is own
    assert isinstance(own, roomier.Logger)
    assert [step for step, _ in own.rows] == [1, 1]
