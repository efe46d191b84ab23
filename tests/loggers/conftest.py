"""A module with two layers and a loader for it. Notices that are printed only once are printed again in the next
test."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.api import logger as logger_module


class Line(roomier.Module):
    def __init__(self, width: int = 4, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4)


@pytest.fixture(autouse=True)
def printed_again() -> Iterator[None]:
    logger_module._reported.clear()
    yield
    logger_module._reported.clear()
