"""Load batches in worker processes. If a GPU is available, copy the batches from pinned memory."""

import torch
from autoencoder import LitAutoEncoder, loader

from roomier import Trainer

train_loader = loader(num_workers=2, pin_memory=torch.cuda.is_available(), persistent_workers=True)
trainer = Trainer(max_epochs=2)
trainer.fit(LitAutoEncoder(), train_loader)
print(f"{trainer.global_step} steps")
assert trainer.global_step == 64
