import time

import torch

import roomier


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        time.sleep(0.02)  # decode an image
        return torch.randn(64), torch.randn(1)


class Line(roomier.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


trainer = roomier.Trainer(max_epochs=1, profiler="simple", enable_progress_bar=False)
trainer.fit(Line(), torch.utils.data.DataLoader(Images(), batch_size=8))
