import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import roomier


def draw(label):
    """Return images (N, 1, 16, 16) of a bar: horizontal, vertical or diagonal, with noise."""
    bars = torch.zeros(3, 16, 16)
    bars[0, 7:9], bars[1, :, 7:9], bars[2] = 1, 1, torch.eye(16)
    noise = 0.3 * torch.rand(len(label), 16, 16, generator=torch.Generator().manual_seed(1))
    return (0.7 * bars[label] + noise).unsqueeze(1)


class Bars(roomier.DataModule):
    def setup(self, stage):
        label = torch.arange(300) % 3
        self.data = TensorDataset(draw(label), label)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=20, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=60)


class Classifier(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, label = batch
        return F.cross_entropy(self.net(x), label)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
