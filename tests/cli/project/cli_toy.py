"""User code in the current folder of the command."""

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn

import roomier


class ToyModule(roomier.Module):
    """Linear model for random data.

    Args:
        lr: learning rate.
    """

    def __init__(self, lr: float = 0.1, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.line = nn.Linear(width, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.line(batch) ** 2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.line(batch) ** 2).mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", (self.line(batch) ** 2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class HasForward(roomier.Module):
    """Module with a forward, which can be exported."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PlainNetwork(nn.Module):
    """Network that is not a roomier.Module, and whose forward returns a loss."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.line = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.line(x) ** 2).mean()


class ToyData(roomier.DataModule):
    def __init__(self, num_batches: int = 6) -> None:
        self.batches = [torch.randn(2, 4) for _ in range(num_batches)]

    def train_dataloader(self) -> list[Tensor]:
        return self.batches

    def val_dataloader(self) -> list[Tensor]:
        return self.batches[:2]

    test_dataloader = predict_dataloader = val_dataloader


class CountsPredictions(roomier.Callback):
    num_seen = 0

    def on_predict_batch_end(self, *_: Any) -> None:
        CountsPredictions.num_seen += 1


class LogsAVector(ToyModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("vector", self.line(batch))
        return super().training_step(batch, batch_idx)


class HasABug(ToyModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise KeyError("a bug of the user")


class HasABugInAHook(ToyModule):
    def on_train_start(self) -> None:
        raise KeyError("a bug of the user")


class IsTerminated(ToyModule):
    """Module that sends SIGTERM to its process in the third step of a run. A run that resumes from this step sends no
    signal."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)
