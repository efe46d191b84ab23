from pathlib import Path

import ray
from project import QUIET, Classifier, loaders
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import roomier
from roomier.engines.ray import RayTrainReport


def train():
    roomier.seed_everything(0)
    trainer = roomier.Trainer(
        accelerator="cpu",
        strategy="zero2",
        max_epochs=4,
        callbacks=[RayTrainReport()],
        **QUIET,
    )
    trainer.fit(Classifier(64, 0.01), *loaders())


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
result = TorchTrainer(
    train,
    scaling_config=ScalingConfig(num_workers=2),  # or (1, 2): as many workers as the cluster has room for
    run_config=RunConfig(
        name="classifier",
        storage_path=str(Path("ray").absolute()),  # a folder that all nodes share
        failure_config=FailureConfig(max_failures=3),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    ),
).fit()
for checkpoint, metrics in result.best_checkpoints:
    print(f"val_loss {metrics['val_loss']:.3f} in {Path(checkpoint.path).relative_to(Path().absolute())}")
