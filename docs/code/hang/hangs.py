import os
import time

import torch

import roomier


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if index >= 200 and os.environ.get("RANK") == "1":
            time.sleep(1000)  # a download that never answers
        return torch.randn(8), torch.randn(1)


class Line(roomier.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


trainer = roomier.Trainer(
    devices=2,
    strategy="ddp",
    max_epochs=1,
    hang_timeout="00:00:00:08",  # by default, ten minutes
    enable_progress_bar=False,
)
trainer.fit(Line(), torch.utils.data.DataLoader(Slow(), batch_size=4))
