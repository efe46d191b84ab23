import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import roomier


class Points(roomier.DataModule):
    def __init__(self, batch_size: int = 20):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
        label = x[:, :3].argmax(dim=1)
        self.train, self.val = TensorDataset(x[:500], label[:500]), TensorDataset(x[500:], label[500:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=50)


class Classifier(roomier.Module):
    def __init__(self, width: int = 16, dropout: float = 0.1, learning_rate: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        x, label = batch
        loss = F.cross_entropy(self.net(x), label)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, label = batch
        self.log("val_loss", F.cross_entropy(self.net(x), label), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
