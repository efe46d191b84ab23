import torch
from torch import nn

import roomier


class Points(roomier.DataModule):
    def train_dataloader(self):
        x = torch.randn(600, 4)
        data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(dim=1))
        return torch.utils.data.DataLoader(data, batch_size=20, shuffle=True)


class Classifier(roomier.Module):
    def __init__(self, width: int = 512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3)
        )

    def training_step(self, batch, batch_idx):
        x, label = batch
        return nn.functional.cross_entropy(self.net(x), label)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
