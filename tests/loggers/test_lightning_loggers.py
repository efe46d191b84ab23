"""Lightning's loggers write the same files with roomier's Trainer as with Lightning's Trainer."""

import csv
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from roomier.core.errors import PlanError
from tests.loggers.conftest import Line
from tests.loggers.test_tensorboard_logger import points, read

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("ignore:.*(pkg_resources|isinstance.treespec|LeafSpec|litlogger).*"),
]


def fit(make_trainer, logger: object, loader: DataLoader) -> object:
    trainer = make_trainer(logger=logger, max_steps=2, log_every_n_steps=1)
    trainer.fit(Line(), loader)
    trainer.test(Line(), loader)
    return trainer


def test_csv_and_tensorboard_together(make_trainer, loader, tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    table, board = loggers.CSVLogger(tmp_path / "own"), loggers.TensorBoardLogger(tmp_path / "own", name="tb")
    trainer = fit(make_trainer, [table, board], loader)
    assert trainer.loggers[:2] == [table, board]
    with (Path(table.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["train_loss"]] == ["1", "2"]
    assert [row["step"] for row in rows if row["test_loss"]]
    assert [step for step, _ in points(Path(board.log_dir), "train_loss")] == [1, 2]
    assert b"width" in read(Path(board.log_dir)).SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert "width: 4" in (Path(table.log_dir) / "hparams.yaml").read_text()


def test_failed_logger_prints_a_notice_and_the_run_continues(
    make_trainer, loader, tmp_path: Path, monkeypatch, capsys
) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path / "own")
    monkeypatch.setattr(logger, "log_metrics", lambda *arguments: torch.zeros(3).item())
    assert fit(make_trainer, logger, loader).global_step == 2
    assert capsys.readouterr().err.count("logger 'lightning CSVLogger' (ForeignLogger) failed in log_metrics") == 2


@pytest.mark.parametrize("what", ["class", "half"])
def test_object_without_all_methods_is_rejected(make_trainer, what: str) -> None:
    class Half:
        def log_metrics(self, metrics: object, step: int) -> None: ...

    with pytest.raises(PlanError, match="must be a name or a logger"):
        make_trainer(logger=Half if what == "class" else Half())
