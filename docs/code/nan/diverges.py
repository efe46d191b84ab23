import sys

import torch
from torch import nn

import roomier


class Rates(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        error = (self.net(x) - y).square()
        if batch_idx == 7:
            error = error * 0  # for example, a batch in which everything is masked
        return torch.sqrt(error).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


roomier.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(100, 4), torch.randn(100, 1))
callbacks = [roomier.callbacks.SpikeGuard(action="skip")] if "guard" in sys.argv else []
trainer = roomier.Trainer(
    max_epochs=1,
    log_every_n_steps=1 if "every" in sys.argv else 50,
    detect_anomaly="detect" in sys.argv,
    callbacks=callbacks,
    enable_progress_bar=False,
)
trainer.fit(Rates(), torch.utils.data.DataLoader(data, batch_size=5))
