"""Train on two ranks with the strategies ddp, zero2 and zero3, and compare the losses.

Run ``python sharded.py`` once. The script starts the other ranks.
"""

import torch
from autoencoder import LitAutoEncoder, loader

from roomier import Trainer, seed_everything

losses = {}
for strategy in ("ddp", "zero2", "zero3"):
    seed_everything(0)
    trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, logger=False)
    trainer.fit(LitAutoEncoder(width=64), loader(), loader(64))
    losses[strategy] = trainer.validate(dataloaders=loader(64))[0]["val_loss"]
if trainer.is_global_zero:
    print({strategy: round(float(loss), 5) for strategy, loss in losses.items()})
assert all(torch.isclose(torch.tensor(loss), torch.tensor(losses["ddp"])) for loss in losses.values())
