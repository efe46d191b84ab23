"""A sweep of seven trials on two ranks: ``STORAGE_FOLDER [RANK_THAT_FAILS]``.

Each rank prints, per trial, its suggestions, the step at which the run ended, and the outcome.
"""

import json
import os
import sys
from pathlib import Path

import optuna
import torch

import roomier
from roomier.callbacks import OptunaPruning
from roomier.sweeps import OptunaStudy

FOLDER = Path(sys.argv[1])
FAILING_RANK = int(sys.argv[2]) if len(sys.argv) > 2 else None
DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 32)[:, None])


class Line(roomier.Module):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self.layer.weight)

    def error_of(self, batch):
        return (self.layer(batch[0]) - 3 * batch[0] - 1).pow(2).mean()

    def training_step(self, batch, batch_idx):
        if self.lr > 0.5 and (FAILING_RANK is None or int(os.environ.get("RANK", "0")) == FAILING_RANK):
            raise ArithmeticError("the learning rate is too high")
        return self.error_of(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.error_of(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def show(name, row):
    # One write, because the ranks share the pipe.
    os.write(1, f"{name} {os.environ['RANK']} {json.dumps(row)}\n".encode())


def objective(trial):
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    batch_size = trial.suggest_categorical("batch_size", [2, 4])
    trainer = roomier.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_plan_table=False,
        default_root_dir=FOLDER / "runs",
        callbacks=[OptunaPruning(trial, monitor="val_loss")],
    )
    outcome = "failed"
    try:
        trainer.fit(Line(lr), torch.utils.data.DataLoader(DATA, batch_size), torch.utils.data.DataLoader(DATA, 16))
        outcome = "finished"
    except optuna.TrialPruned:
        outcome = "pruned"
        raise
    finally:
        row = [trial.number, lr, batch_size, trainer.global_step, outcome]
        show("trial", row)
    return trainer.callback_metrics["val_loss"]


optuna.logging.set_verbosity(optuna.logging.ERROR)
study = OptunaStudy(
    direction="minimize",
    storage=f"sqlite:///{FOLDER}/sweep.db",
    study_name="line",
    load_if_exists=True,
    sampler=optuna.samplers.RandomSampler(seed=None if int(os.environ.get("RANK", "0")) else 0),
    pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
)
study.enqueue_trial({"lr": 0.3, "batch_size": 4})
study.enqueue_trial({"lr": 0.9, "batch_size": 4})
study.enqueue_trial({"lr": 0.1, "batch_size": 2})
study.enqueue_trial({"lr": 0.001, "batch_size": 2})
study.optimize(objective, n_trials=6, catch=ArithmeticError)
show("best", [study.best_value, study.best_params, len(study.trials)])
