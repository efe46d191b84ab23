import sys

import torch
from torch import nn

import roomier


class Noisy(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


folder, max_steps = sys.argv[1], int(sys.argv[2])
roomier.seed_everything(0)
x = torch.randn(400, 8)
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
model = Noisy()
trainer = roomier.Trainer(max_steps=max_steps, default_root_dir=folder)
path = "last" if "resume" in sys.argv else None
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=20, shuffle=True), ckpt_path=path)
torch.save(model.state_dict(), f"{folder}.pt")
