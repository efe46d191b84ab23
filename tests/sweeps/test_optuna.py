"""Sweeps with Optuna: pruning at a step boundary, the same trials on all ranks, and trials that fail."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import roomier
from roomier.callbacks import OptunaPruning
from roomier.core.errors import RoomierError
from roomier.sweeps import OptunaStudy

optuna = pytest.importorskip("optuna", reason="optuna is not installed (pip install 'roomier[sweeps]')")

PROGRAM = Path(__file__).parent / "programs" / "optuna_sweep.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "optuna_sweep.py"
BATCHES = [torch.full((2, 1), 0.5)] * 4


class Constant(roomier.Module):
    """Logs the given losses, one per validation."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.losses[self.trainer.global_step // 2 - 1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer_of(root: Path, callbacks: list[Any], **keywords: Any) -> roomier.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "val_check_interval": 2,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": root,
    }
    return roomier.Trainer(callbacks=callbacks, **{**settings, **keywords})


class Noted(roomier.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_exception(self, trainer, pl_module, exception):
        self.calls.append("on_exception")

    def teardown(self, trainer, pl_module, stage):
        self.calls.append("teardown")


def test_a_pruned_run_ends_at_its_step_and_later_trials_are_not_affected(tmp_path: Path) -> None:
    losses = {0: [4.0, 3.0, 2.0, 1.0], 1: [5.0, 4.0, 3.0, 2.0], 2: [6.0, 9.0, 9.0, 9.0], 3: [1.0, 1.0, 1.0, 0.5]}
    steps, notes = [], []

    def objective(trial: optuna.Trial) -> float:
        noted = Noted()
        trainer = trainer_of(tmp_path, [OptunaPruning(trial, monitor="val_loss"), noted])
        try:
            trainer.fit(Constant(losses[trial.number]), BATCHES, BATCHES[:1])
        finally:
            steps.append(trainer.global_step)
            notes.append(noted.calls)
        return trainer.callback_metrics["val_loss"]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1)
    study = OptunaStudy(direction="minimize", pruner=pruner)
    study.optimize(objective, n_trials=4)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "PRUNED", "COMPLETE"]
    assert steps == [8, 4, 4, 8]  # the second validation, in the middle of the epoch, prunes
    assert notes == [["teardown"]] * 4  # a pruned trial is not a failed run
    assert [trial.intermediate_values for trial in study.trials[1:3]] == [{0: 5.0, 1: 4.0}, {0: 6.0, 1: 9.0}]
    assert study.best_trial.number == 3
    assert study.best_value == 0.5


def of_ranks(output: str, name: str) -> list[list[Any]]:
    """Return the lines of each rank that start with ``name``."""
    rows = [(int(rank), json.loads(row)) for rank, row in re.findall(rf"{name} (\d) (\[.*?\])$", output, re.MULTILINE)]
    return [[row for owner, row in rows if owner == rank] for rank in (0, 1)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environ)


@pytest.mark.services
def test_ranks_started_by_the_script(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    trials, others = of_ranks(done.stdout, "trial")
    assert trials == others
    assert [row[0] for row in trials] == list(range(6))
    outcomes = [row[-1] for row in trials]
    assert outcomes[:4] == ["finished", "failed", "finished", "pruned"]
    assert [row[-2] for row in trials[:4]] == [16, 0, 32, 16]  # steps
    best, other = of_ranks(done.stdout, "best")
    assert best == other
    study = optuna.load_study(study_name="line", storage=f"sqlite:///{tmp_path}/sweep.db")
    assert [study.best_value, study.best_params, len(study.trials)] == best[0]
    assert [trial.state.name for trial in study.trials[:4]] == ["COMPLETE", "FAIL", "COMPLETE", "PRUNED"]


@pytest.mark.services
def test_the_example_finds_a_trial(tmp_path: Path) -> None:
    source = EXAMPLE.read_text()
    assert source.count("n_trials=10") == source.count("max_epochs=5") == 1
    short = tmp_path / "short.py"
    short.write_text(source.replace("n_trials=10", "n_trials=2").replace("max_epochs=5", "max_epochs=1"))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, short], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    study = optuna.load_study(study_name="example", storage=f"sqlite:///{tmp_path}/sweep.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    assert f"best of 2 trials: {study.best_value:.4f} with {study.best_params}" in done.stdout


@pytest.mark.services
def test_an_error_on_one_rank_ends_the_sweep(tmp_path: Path) -> None:
    done = run(tmp_path, 1)
    assert done.returncode != 0
    assert "OptunaStudy(objective)" in done.stderr
    assert "ArithmeticError: the learning rate is too high" in done.stderr
    study = optuna.load_study(study_name="line", storage=f"sqlite:///{tmp_path}/sweep.db")
    assert [trial.state.name for trial in study.trials[:1]] == ["COMPLETE"]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(RoomierError, match=r"OptunaPruning\(trial\)=None: must be a trial of Optuna"):
        OptunaPruning(None, "val_loss")
    with pytest.raises(RoomierError, match="n_jobs=2: the ranks"):
        OptunaStudy().optimize(lambda trial: 0.0, n_trials=1, n_jobs=2)
