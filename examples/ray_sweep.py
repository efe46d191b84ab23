"""Ray Tune searches the learning rate of a small model. ASHA ends unpromising trials at the end of a step.

pip install 'roomier[sweeps]'
python examples/ray_sweep.py [FOLDER]
"""

import sys
from pathlib import Path

import ray
import torch
from ray import tune
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.callbacks import RayTuneReport


class Line(roomier.Module):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.layer = torch.nn.Linear(1, 1)

    def error_of(self, batch):
        (x,) = batch
        return (self.layer(x) - 3 * x - 1).pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self.error_of(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.error_of(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def train(config):
    roomier.seed_everything(0)
    data = TensorDataset(torch.linspace(-1, 1, 64)[:, None])
    checkpoint = tune.get_checkpoint()  # None, unless Ray has restarted the trial
    trainer = roomier.Trainer(
        max_epochs=8,
        accelerator="cpu",
        enable_progress_bar=False,
        callbacks=[RayTuneReport("val_loss", checkpoint=True)],
    )
    trainer.fit(Line(config["lr"]), DataLoader(data, 8), DataLoader(data, 64), ckpt_path=checkpoint and checkpoint.path)


def main(folder):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tuner = tune.Tuner(
        train,
        param_space={"lr": tune.grid_search([0.3, 0.1, 0.0003, 0.0001])},
        tune_config=tune.TuneConfig(
            metric="val_loss",
            mode="min",
            scheduler=tune.schedulers.ASHAScheduler(max_t=8, grace_period=2, reduction_factor=2),
            max_concurrent_trials=1,
        ),
        run_config=tune.RunConfig(storage_path=str(folder), name="lines", verbose=0),
    )
    results = tuner.fit()
    for result in results:
        metrics = result.metrics
        print(
            f"lr {metrics['config']['lr']}: val_loss {metrics['val_loss']:.4f}, {metrics['training_iteration']} reports"
        )
    best = results.get_best_result()
    print(f"best: lr {best.config['lr']}, checkpoint {best.checkpoint.path}")
    return results


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sweep").absolute())
