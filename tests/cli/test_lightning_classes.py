"""``roomier fit`` with a module, data, callbacks and loggers written for Lightning."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

import roomier
from roomier.cli.main import main

pytestmark = pytest.mark.more

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


class Bare(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    training_step = Line.training_step


class Points(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(16, 2), self.batch_size)

    val_dataloader = train_dataloader


class Shuffled(Points):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(32.0).view(16, 2) / 32, self.batch_size, shuffle=True)
"""


PLAIN = """
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x):
        return self.line(x).square().mean()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.argv", ["main.py"])  # LightningCLI warns about arguments of pytest
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")  # LightningCLI changes both variables
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lines_of_lightning.py").write_text(MODULE)
    return tmp_path


def test_lightning_project_runs_from_yaml(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopping = {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}}
    keeping = {"class_path": "roomier.callbacks.ModelCheckpoint", "init_args": {"monitor": "val_loss"}}
    own_log = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
    trainer = {"max_epochs": 2, "log_every_n_steps": 1, "enable_progress_bar": False, "enable_model_summary": False}
    config = {
        "trainer": {**trainer, "callbacks": [stopping, keeping], "logger": [own_log]},
        "model": {"class_path": "lines_of_lightning.Line", "init_args": {"lr": 0.2}},
        "data": {"class_path": "lines_of_lightning.Points", "init_args": {"batch_size": 8}},
    }
    (project / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "run.yaml"]) == 0
    kept = yaml.safe_load((project / "runs" / "version_0" / "config.yaml").read_text())
    assert [each["class_path"] for each in kept["trainer"]["callbacks"]] == [
        stopping["class_path"],
        keeping["class_path"],
    ]
    assert "val_loss" in next((project / "logs").rglob("metrics.csv")).read_text()
    capsys.readouterr()
    words = ["--model", "lines_of_lightning.Line", "--data", "lines_of_lightning.Points", "--ckpt_path", "last"]
    assert main(["validate", *words, "--trainer.callbacks", "lightning.pytorch.callbacks.Timer"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["val_loss"] < 0.1


def printed_by_lightning(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        LightningCLI(args=["fit", *words, "--print_config"])
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # advice of Lightning about workers and loggers
@pytest.mark.parametrize(
    "sections",
    [
        ["--model", "lines_of_lightning.Line"],
        [
            *("--model", "lines_of_lightning.Bare", "--optimizer", "torch.optim.AdamW", "--optimizer.lr", "0.1"),
            *("--lr_scheduler", "torch.optim.lr_scheduler.StepLR", "--lr_scheduler.step_size", "1"),
        ],
        ["--model", "lines_of_lightning.Line", "--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.03"],
    ],
    ids=["optimizer of the model", "optimizer and scheduler", "replaced optimizer"],
)
def test_yaml_that_lightning_prints_trains_as_in_lightning(
    sections: list[str], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", "lines_of_lightning.Shuffled", "--data.batch_size", "3", *sections]
    text = printed_by_lightning([*words, "--trainer.max_epochs", "3", "--trainer.accelerator", "cpu"], capsys)
    printed = yaml.safe_load(text)
    assert {"use_distributed_sampler", "plugins", "barebones", "model_registry"} <= printed["trainer"].keys()
    assert (printed["optimizer"] is None) == ("--optimizer" not in sections)
    (project / "run.yaml").write_text(text)
    quiet = [f"--trainer.{name}=false" for name in ("logger", "enable_progress_bar", "enable_model_summary")]
    expected = LightningCLI(
        args=["fit", "--config", "run.yaml", *quiet, "--trainer.enable_checkpointing=false"], save_config_callback=None
    ).model.state_dict()
    assert main(["fit", "--config", "run.yaml", *quiet]) == 0
    [checkpoint] = (project / "runs").rglob("checkpoints/*")
    found = roomier.checkpoint.load(checkpoint)["module"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_section_without_class_path_sets_arguments_of_the_model_on_the_command_line(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LightningCLI prints such sections if the script passes the classes to it."""
    (project / "run.yaml").write_text("model: {lr: 0.25}\ndata: {batch_size: 8}\noptimizer: null\nlr_scheduler: null\n")
    words = ["--model", "lines_of_lightning.Line", "--data", "lines_of_lightning.Points", "--config", "run.yaml"]
    with pytest.raises(SystemExit):
        main(["fit", *words, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"] == {"lr": 0.25}
    assert printed["data"]["init_args"] == {"batch_size": 8}


def test_all_problems_of_a_file_are_reported_together(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
    seed_everything: x
    trainer:
      max_step: 3
      max_epochs: three
      sync_batchnorm: maybe
      use_distributed_sampler: maybe
      precision: half
      callbacks:
      - {class_path: EarlyStopping, init_args: {monitor: v, patience: y}}
      - {class_path: lightning.pytorch.callbacks.Timers}
    model: {class_path: lines_of_lightning.Line, init_args: {lrr: 1, lr: x}}
    data: lines_of_lightning.Pints
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1, momentun: 0.9}}
    """
    (project / "run.yaml").write_text(text)
    assert main(["fit", "--config", "run.yaml", "--trainer.nodes=2"]) == 2
    error = capsys.readouterr().err
    lines = error.splitlines()
    expected = [
        "seed_everything='x'",
        "Did you mean 'max_steps'?",
        "trainer.max_epochs='three'",
        "sync_batchnorm='maybe'",
        "use_distributed_sampler='maybe'",
        "precision='half'",
        "trainer.callbacks.patience='y'",
        "Did you mean 'Timer'?",
        "Did you mean 'lr'?",
        "model.lr='x'",
        "Did you mean 'Points'?",
        "Did you mean 'momentum'?",
        "--trainer.nodes",
    ]
    assert lines[0] == f"roomier: error: The command has {len(expected)} errors"
    for text in expected:
        assert sum(text in line for line in lines) == 1, text
    assert len(lines) == 1 + len(expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"], "requires an optimizer"),
        (["--optimizer=SGD", "--trainer.optimizer=adamw"], "cannot be combined with --trainer.optimizer"),
    ],
)
def test_optimizer_options_that_contradict_each_other_are_rejected(
    words: list[str], expected: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = ["--model", "lines_of_lightning.Line", "--data", "lines_of_lightning.Points"]
    assert main(["fit", *classes, *words]) == 2
    assert expected in capsys.readouterr().err


def test_optimizer_option_of_a_plain_module_trains_and_is_planned(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "plain_lines.py").write_text(PLAIN)
    words = ["--model", "plain_lines.Plain", "--data", "lines_of_lightning.Points", "--optimizer=Adagrad"]
    assert main(["fit", *words, "--optimizer.lr=0.5", "--trainer.max_steps=2", "--trainer.accelerator=cpu"]) == 0
    assert "Adagrad" in capsys.readouterr().err
    assert main(["plan", *words, "--hardware=a100-40gb:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] is not None
