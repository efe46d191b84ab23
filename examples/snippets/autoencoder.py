"""Module and data for the other snippets: an autoencoder for vectors of 64 numbers, with synthetic data."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import roomier


class LitAutoEncoder(roomier.Module):
    def __init__(self, width=16, learning_rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))
        self.decoder = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, x, batch_idx):
        loss = nn.functional.mse_loss(self(x), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, x, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(x), x))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def loader(num_samples=256, batch_size=8, **options):
    mix = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    codes = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(codes @ mix, batch_size, **options)
