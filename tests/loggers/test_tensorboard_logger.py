"""TensorBoard files, read with TensorBoard's reader."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from roomier.core.errors import RoomierError
from roomier.loggers import TensorBoardLogger


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(name)]


def test_scalars_are_written(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    logger.log_metrics({"loss": 2.5, "val/acc": 0.5}, 1)
    logger.log_metrics({"loss": 1.5}, 2)
    logger.finalize("success")
    assert points(tmp_path, "loss") == [(1, 2.5), (2, 1.5)]
    assert points(tmp_path, "val/acc") == [(1, 0.5)]


def test_resumed_run_hides_points_after_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The counter in the file names has no leading zeros, so the name of file 10 sorts before the name of file 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"loss": float(step)}, step)
    logger.finalize("failed")
    (tmp_path / "events.out.tfevents.copy").touch()
    logger = TensorBoardLogger()
    logger.start(tmp_path, resumed_step=2)
    logger.log_metrics({"loss": 30.0}, 3)
    logger.finalize("success")
    assert points(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_logger_used_after_a_run_opens_a_new_file_in_the_next_run(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    for number in (1, 2):
        folder = tmp_path / str(number)
        logger.start(folder)
        logger.log_metrics({"loss": 0.5 * number}, 1)
        logger.finalize("success")
        logger.experiment.add_scalar("after", number, 9)
    logger.finalize("success")
    for number in (1, 2):
        folder = tmp_path / str(number)
        assert points(folder, "loss") == [(1, 0.5 * number)]
        assert points(folder, "after") == [(9, number)]


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


def test_writer_is_available_from_the_start_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = TensorBoardLogger()
    logger.experiment.add_scalar("loss", 1.0, 1)
    logger.experiment.add_text("note", "x")
    reason = "has no file before a fit that writes files: calls of its experiment are ignored, such as add_scalar()"
    assert capsys.readouterr().err.count(reason) == 1
    logger.start(tmp_path)
    assert Path(logger.experiment.log_dir) == tmp_path
    logger.finalize("success")
    logger.experiment.add_scalar("after", 1.0, 1)
    logger.finalize("success")
    assert points(tmp_path, "after") == [(1, 1.0)]


def test_separate_folder_is_numbered_and_found_by_a_resumed_run(tmp_path: Path) -> None:
    before = TensorBoardLogger(tmp_path / "logs", "model")
    before.experiment.add_scalar("before", 1.0, 0)  # opens the writer
    before.start(tmp_path / "run_0")
    assert before.log_dir == str(tmp_path / "logs" / "model" / "version_0")
    assert before.save_dir == str(tmp_path / "logs" / "model")
    assert before.version == "version_0"
    before.finalize("success")
    for run, version in (("run_1", "version_1"), ("run_0", "version_0"), ("run_1", "version_1")):
        logger = TensorBoardLogger(tmp_path / "logs", "model")
        logger.start(tmp_path / run)
        logger.finalize("success")
        assert logger.version == version
    named = TensorBoardLogger(str(tmp_path / "logs"), name=None, version=7)
    named.start(tmp_path / "run_2")
    named.finalize("success")
    assert named.log_dir == str(tmp_path / "logs" / "version_7")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_log_graph(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.start(tmp_path)
    logger.log_graph(torch.nn.Linear(3, 2), torch.zeros(4, 3))
    with pytest.raises(RoomierError, match="is required, because the graph is traced on this input"):
        logger.log_graph(torch.nn.Linear(3, 2))
    logger.finalize("success")
    assert b"Linear" in read(tmp_path).Graph().SerializeToString()
    with pytest.raises(RoomierError, match="log_graph"):
        TensorBoardLogger(log_graph=True)


def test_experiment_has_no_effect_on_other_ranks(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = TensorBoardLogger(tmp_path)  # this logger is never started on other ranks
    logger.experiment.add_scalar("loss", 1.0, 1)
    logger.experiment.get_logdir().strip()
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_hyperparams({"lr": 1.0})
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""
