import os
import shutil

import fsspec
import torch
from project import Classifier, Points

import roomier

os.environ["ROOMIER_CACHE"] = "cache"
roomier.seed_everything(0)


def fit(max_epochs, ckpt_path=None):
    trainer = roomier.Trainer(
        default_root_dir="memory://bucket/runs",  # or "s3://bucket/runs"
        max_epochs=max_epochs,
        enable_plan_table=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), datamodule=Points(), ckpt_path=ckpt_path)
    return trainer


trainer = fit(max_epochs=2)
print(trainer.checkpoint_callback.best_model_path)
for name in fsspec.filesystem("memory").find("bucket/runs/version_0/checkpoints"):
    print(name)

shutil.rmtree("cache")  # as on a new machine
resumed = fit(max_epochs=4, ckpt_path="last")

path = roomier.checkpoint.find_last("memory://bucket/runs")
model = Classifier.load_from_checkpoint(path)
assert all(map(torch.equal, model.parameters(), resumed.model.parameters()))
print("loaded", path)
