"""Runs of a small GPT that the device tests interrupt, resume and compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from roomier import Callback, Module, Trainer
from tests.simulator.gpt import GPT, batches

NUM_STEPS = 5
BATCH_SIZE = 4
RELATIVE = 1e-6  # bound on differences between the simulated device and the CPU in fp32


class Language(Module):
    """A small GPT. ``training_step`` stores its losses without waiting for the device."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(width=width, dropout=dropout)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0])
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.network(batch[0]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.network(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0])
        return loss


def loader(num_batches: int = NUM_STEPS, *, shuffle: bool = False, batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    """Return a loader of ``num_batches`` batches of tokens."""
    data = torch.cat(batches(num_batches, batch_size))
    return DataLoader(TensorDataset(data), batch_size=batch_size, shuffle=shuffle)


def trainer_of(folder: Path, accelerator: str, callbacks: Sequence[Callback] = (), **keywords: Any) -> Trainer:
    """Return a Trainer that trains ``NUM_STEPS`` steps and prints no text. By default, the Trainer has no logger."""
    # With this eps, Adam does not amplify the rounding of gradients that are almost zero.
    optimizer = {"name": "adamw", "lr": 3e-3, "eps": 1e-3}
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"max_steps": NUM_STEPS, "optimizer": optimizer, **quiet, **keywords}
    return Trainer(accelerator=accelerator, default_root_dir=folder, callbacks=list(callbacks), **settings)


def weights_of(module: Module) -> dict[str, Tensor]:
    """Return the unsharded weights on the CPU. Every rank must call this function."""
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in module.state_dict().items()}
    return {name: value.detach().cpu().clone() for name, value in full.items()}


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest difference of a weight, relative to the largest weight of its tensor."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)
