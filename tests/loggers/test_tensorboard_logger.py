"""TensorBoard, read back with TensorBoard's own reader."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from roomier.loggers import TensorBoardLogger


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_scalars_arrive(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    logger.log_metrics({"loss": 2.5, "val/acc": 0.5}, 1)
    logger.log_metrics({"loss": 1.5}, 2)
    logger.finalize("success")
    assert points(tmp_path, "loss") == [(1, 2.5), (2, 1.5)]
    assert points(tmp_path, "val/acc") == [(1, 0.5)]


def test_a_resumed_run_hides_the_points_after_its_step(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"loss": float(step)}, step)
    logger.finalize("failed")
    logger = TensorBoardLogger()
    logger.start(tmp_path, resumed_step=2)
    logger.log_metrics({"loss": 30.0}, 3)
    logger.finalize("success")
    assert points(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_hyperparameters_are_in_the_same_run(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    logger.log_hyperparams({"lr": 0.5, "model": {"depth": 2}, "layers": [1, 2]})
    logger.finalize("success")
    [file] = list(tmp_path.iterdir())
    data = read(tmp_path).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for word in (b"lr", b"model/depth", b"[1, 2]"):
        assert word in data
    assert file.name.startswith("events.")


def test_the_writer_is_there_after_start(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    with pytest.raises(AssertionError, match="start"):
        _ = logger.experiment
    logger.start(tmp_path)
    assert Path(logger.experiment.log_dir) == tmp_path
    logger.finalize("success")


def test_on_other_ranks_the_experiment_takes_everything_and_does_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = TensorBoardLogger()  # never started there
    logger.experiment.add_scalar("loss", 1.0, 1)
    logger.experiment.get_logdir().strip()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(AssertionError, match="start"):
        _ = logger.experiment
