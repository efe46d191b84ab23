"""Train a module that was written for Lightning, without changes to the module."""

import lightning.pytorch as pl
import torch
from autoencoder import loader
from torch import nn

from roomier import Trainer


class LitRegressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(63, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.network(batch[:, :63]), batch[:, 63:])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]


trainer = Trainer(max_epochs=3)
trainer.fit(LitRegressor(), loader())
loss = float(trainer.callback_metrics["train_loss_epoch"])
print(f"train_loss {loss:.4f}")
assert loss < 0.5
