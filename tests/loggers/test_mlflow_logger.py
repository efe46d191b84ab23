"""The logger for mlflow, with a file store. Results are read with mlflow's client."""

from pathlib import Path
from typing import Any

import pytest

from roomier.core.errors import RoomierError
from roomier.loggers import MLFlowLogger

pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def fit(make_trainer: Any, line: Any, loader: Any, logger: MLFlowLogger, max_steps: int, **fit_arguments: Any) -> Any:
    trainer = make_trainer(logger=logger, max_steps=max_steps, log_every_n_steps=1, enable_checkpointing=True)
    trainer.fit(line, loader, **fit_arguments)
    return trainer


def test_fit_resume_and_test_use_one_run(make_trainer, line, loader, tmp_path: Path) -> None:
    store = tmp_path / "mlruns"
    logger = MLFlowLogger("digits", run_name="first", save_dir=store, tags={"a": "b"}, prefix="x")
    trainer = fit(make_trainer, line, loader, logger, 2)
    trainer.test(line, loader)
    resumed = MLFlowLogger("digits", save_dir=store)
    fit(make_trainer, line, loader, resumed, 3, ckpt_path="last")
    assert resumed.run_id == logger.run_id
    assert resumed.save_dir == str(store)

    client = resumed.experiment
    run = client.get_run(resumed.run_id)
    assert client.get_experiment(resumed.experiment_id).name == "digits"
    assert (run.info.run_name, run.data.tags["a"], run.data.params) == ("first", "b", {"width": "4", "depth": "1"})
    assert [each.step for each in client.get_metric_history(run.info.run_id, "x-train_loss")] == [1, 2]
    assert [each.step for each in client.get_metric_history(run.info.run_id, "train_loss")] == [3]
    assert "x-test_loss" in run.data.metrics
    resumed.finalize("interrupted")
    assert client.get_run(run.info.run_id).info.status == "KILLED"


def test_changed_hyperparameters_are_reported_and_ignored(tmp_path: Path, capsys) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.start(tmp_path / "run")
    logger.log_hyperparams({"lr": 0.1, "model": {"depth": 2}, "long": "x" * 9000, **{f"p{i}": i for i in range(120)}})
    logger.log_hyperparams({"lr": 0.5, "new": 1})
    params = logger.experiment.get_run(logger.run_id).data.params
    assert (params["lr"], params["model/depth"], params["new"], len(params)) == ("0.1", "2", "1", 124)
    assert "first run and ignores the new values: lr" in capsys.readouterr().err
    assert not logger.is_muted


def test_invalid_characters_in_names_become_underscores(tmp_path: Path) -> None:
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.start(tmp_path / "run")
    logger.log_metrics({"acc@5": 0.5, "val/loss": float("nan")}, 3)
    assert not logger.is_muted
    assert logger.experiment.get_run(logger.run_id).data.metrics["acc_5"] == 0.5


def test_missing_server_prints_one_notice_and_the_run_continues(make_trainer, line, loader, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger = MLFlowLogger(tracking_uri="http://127.0.0.1:1")
    trainer = fit(make_trainer, line, loader, logger, 2)
    assert trainer.global_step == 2
    assert capsys.readouterr().err.count("logger 'mlflow' (MLFlowLogger) failed in start and is disabled") == 1
    logger.experiment.log_metric("x", "a", 1.0)  # has no effect


def test_log_model_is_rejected() -> None:
    with pytest.raises(RoomierError, match="log_model"):
        MLFlowLogger(log_model=True)
