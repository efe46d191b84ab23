"""One small model for Lightning and for roomier, and runs of Lightning that write checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from roomier import Module

NUM_BATCHES, BATCH_SIZE = 6, 4


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def loader(batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    inputs = torch.randn(NUM_BATCHES * BATCH_SIZE, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)


class Steps:
    """Training code of both modules. ``kind`` selects the optimizer and the scheduler."""

    net: nn.Sequential
    losses: list[float]
    kind: str
    lr: float

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.forward(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.forward(batch[0]), batch[1]))  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            return torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=0.9)
        optimizer = torch.optim.AdamW(
            [{"params": self.net[0].parameters(), "weight_decay": 0.1}, {"params": self.net[2].parameters()}],
            lr=self.lr,
        )
        schedulers = torch.optim.lr_scheduler
        if self.kind == "each epoch":
            return {"optimizer": optimizer, "lr_scheduler": schedulers.StepLR(optimizer, 1, 0.5)}
        each_step = schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": each_step, "interval": "step"}}


class OwnModule(Steps, Module):
    """Module for roomier that can be trained on several ranks without Lightning."""

    def __init__(self, width: int = 8, kind: str = "each epoch", lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.kind, self.lr, self.losses = network(width), kind, lr, []


def lightning_module(**arguments: Any) -> Any:
    """Return an :class:`OwnModule` that is a LightningModule."""
    import lightning.pytorch as pl

    class Theirs(Steps, pl.LightningModule):
        def __init__(self, width: int = 8, kind: str = "each epoch", lr: float = 0.05) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net, self.kind, self.lr, self.losses = network(width), kind, lr, []

    return Theirs(**arguments)


def fit_in_lightning(
    module: Any, max_epochs: int, ckpt_path: Path | None = None, save_at: Path | None = None, **keywords: Any
) -> list[float]:
    """Train with Lightning and return the losses. If ``save_at`` is given, save the final state to this path."""
    import lightning.pytorch as pl

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example, warnings about few workers and deprecated parts of torch
        trainer = pl.Trainer(**{"max_epochs": max_epochs, "accelerator": "cpu", **quiet, **keywords})
        trainer.fit(module, loader(), loader(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
        if save_at is not None:
            trainer.save_checkpoint(save_at)
    found: list[float] = module.losses
    return found
