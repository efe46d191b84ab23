from pathlib import Path

import torch
from project import Classifier, Points

import roomier

roomier.seed_everything(0)
complete = Classifier()
trainer = roomier.Trainer(
    max_epochs=5,
    default_root_dir="complete",
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(complete, datamodule=Points())

(newest,) = Path("runs/version_0/checkpoints").glob("epoch=4-*")
resumed = Classifier.load_from_checkpoint(newest)
for name, weights in complete.state_dict().items():
    print(name, torch.equal(weights, resumed.state_dict()[name]))
