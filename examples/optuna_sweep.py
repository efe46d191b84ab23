"""Optuna searches the learning rate and the width of a small model. Each trial trains on two ranks.

pip install 'roomier[sweeps]'
python examples/optuna_sweep.py

Start the script again to continue the study in sweep.db with further trials.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.callbacks import OptunaPruning
from roomier.sweeps import OptunaStudy


class Classifier(roomier.Module):
    def __init__(self, width, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        x, label = batch
        return nn.functional.cross_entropy(self.net(x), label)

    def validation_step(self, batch, batch_idx):
        x, label = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), label))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def objective(trial):
    roomier.seed_everything(0)
    model = Classifier(
        width=trial.suggest_categorical("width", [16, 64]),
        lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True),
    )
    x = torch.randn(600, 4)
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    train, val = torch.utils.data.random_split(data, [500, 100])
    trainer = roomier.Trainer(
        devices=2,
        accelerator="cpu",
        max_epochs=5,
        enable_progress_bar=False,
        callbacks=[OptunaPruning(trial, monitor="val_loss")],
    )
    trainer.fit(model, DataLoader(train, 25, shuffle=True), DataLoader(val, 50))
    return trainer.callback_metrics["val_loss"]


if __name__ == "__main__":
    study = OptunaStudy(direction="minimize", storage="sqlite:///sweep.db", study_name="example", load_if_exists=True)
    study.optimize(objective, n_trials=10)
    if study.is_global_zero:
        print(f"best of {len(study.trials)} trials: {study.best_value:.4f} with {study.best_params}")
