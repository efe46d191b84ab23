import torch
from project import Classifier, Points
from torch.utils.data import DataLoader

import roomier
from roomier.callbacks import SpikeGuard

roomier.seed_everything(0)
data = Points()
data.setup("fit")
samples = [data.train[index] for index in range(500)]
samples[437] = (torch.full((4,), 1e4), samples[437][1])  # one damaged sample

trainer = roomier.Trainer(
    max_epochs=1,
    limit_val_batches=0,
    callbacks=[SpikeGuard(action="skip", warmup=10, max_skips=3)],
    enable_plan_table=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(samples, batch_size=20))
