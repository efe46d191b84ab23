import os
from pathlib import Path

import ray
from project import QUIET, Classifier, loaders
from ray import tune

import roomier
from roomier.callbacks import RayTuneReport


def train(config):
    roomier.seed_everything(0)
    checkpoint = tune.get_checkpoint()  # None, unless Ray has restarted the trial
    trainer = roomier.Trainer(
        accelerator="cpu",
        max_epochs=8,
        callbacks=[RayTuneReport("val_loss", checkpoint=True)],
        **QUIET,
    )
    trainer.fit(Classifier(64, config["lr"]), *loaders(), ckpt_path=checkpoint and checkpoint.path)


os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # without Ray's tables
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
tuner = tune.Tuner(
    train,
    param_space={"lr": tune.grid_search([0.01, 0.001, 0.0001])},
    tune_config=tune.TuneConfig(
        metric="val_loss",
        mode="min",
        scheduler=tune.schedulers.ASHAScheduler(max_t=8, grace_period=2, reduction_factor=2),
    ),
    run_config=tune.RunConfig(name="lr", storage_path=str(Path("ray").absolute()), verbose=0),
)
results = tuner.fit()
for result in results:
    found = result.metrics
    print(f"lr {result.config['lr']}: val_loss {found['val_loss']:.3f} after {found['training_iteration']} epochs")
print("best:", results.get_best_result().config)
