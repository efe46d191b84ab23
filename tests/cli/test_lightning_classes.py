"""``roomier fit`` with a module, data, callbacks and loggers written for Lightning."""

import json
from pathlib import Path

import pytest
import yaml

from roomier.cli.main import main

MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F


class Line(pl.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.line = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.line(batch), batch.sum(1, keepdim=True))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.mse_loss(self.line(batch), batch.sum(1, keepdim=True)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Points(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 2), self.batch_size)

    val_dataloader = train_dataloader
"""


def test_lightning_project_runs_from_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lines_of_lightning.py").write_text(MODULE)
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}}
    keeping = {"class_path": "roomier.callbacks.ModelCheckpoint", "init_args": {"monitor": "val_loss"}}
    own_log = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
    trainer = {"max_epochs": 2, "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}
    config = {
        "trainer": {**trainer, "callbacks": [stopping, keeping], "logger": [own_log]},
        "model": {"class_path": "lines_of_lightning.Line", "init_args": {"lr": 0.2}},
        "data": {"class_path": "lines_of_lightning.Points", "init_args": {"batch_size": 8}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "run.yaml"]) == 0
    kept = yaml.safe_load((tmp_path / "runs" / "version_0" / "config.yaml").read_text())
    assert [each["class_path"] for each in kept["trainer"]["callbacks"]] == [
        stopping["class_path"],
        keeping["class_path"],
    ]
    assert "val_loss" in next((tmp_path / "logs").rglob("metrics.csv")).read_text()
    capsys.readouterr()
    words = ["--model", "lines_of_lightning.Line", "--data", "lines_of_lightning.Points", "--ckpt_path", "last"]
    assert main(["validate", *words, "--trainer.callbacks", "lightning.pytorch.callbacks.Timer"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["val_loss"] < 0.1
