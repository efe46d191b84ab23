"""A module with dropout, shuffled data, and functions that compare the state after two runs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roomier


class Net(roomier.Module):
    """Module that learns ``2 sin(x)``. The loss decreases fastest at learning rates around 0.1."""

    def __init__(self, lr: float = 1e-3, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.seen: list[int] = []
        self.network = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.network(batch[0]) - batch[1]).square().mean()
        self.seen.append(batch_idx)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.5)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


class Named(Net):
    """Module for a Trainer that specifies the optimizer."""

    def configure_optimizers(self) -> None:
        return None


def shuffled(batch_size: int = 16, **keywords: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(256, 8, generator=generator)
    return DataLoader(TensorDataset(x, 2 * x[:, :1].sin()), batch_size=batch_size, shuffle=True, **keywords)


@pytest.fixture
def loader() -> DataLoader:
    return shuffled()


@pytest.fixture
def net() -> Net:
    roomier.seed_everything(3)
    return Net()
