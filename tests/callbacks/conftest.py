"""A small module with predefined validation losses, and a fast Trainer for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.trainer import Trainer


class Scripted(Module):
    """Module that logs ``scores[n]`` as ``val_loss`` in its n-th validation, and the last score in all later
    validations."""

    def __init__(self, scores: Sequence[float] = (0.0,)) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.scores = list(scores)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(self.scores[min(self.current_epoch, len(self.scores) - 1)]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class KilledError(Exception):
    """Exception that simulates a killed process. Callbacks do not save on this exception."""


class KillAt(Callback):
    """Callback that raises KilledError at the end of the first batch after optimizer step ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self.step:
            raise KilledError


Batches = list[Tensor]


@pytest.fixture
def batches() -> Batches:
    """Ten batches of two samples, so that an epoch has ten steps."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, generator=generator) for _ in range(10)]


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def kill_at() -> type[KillAt]:
    return KillAt


@pytest.fixture
def killed_error() -> type[KilledError]:
    return KilledError


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Return a function that creates a Trainer on the CPU with run folders in ``tmp_path / "runs"``."""

    def make(*callbacks: Callback, **keywords: Any) -> Trainer:
        quiet = {
            "accelerator": "cpu",
            "default_root_dir": tmp_path / "runs",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
        }
        return Trainer(callbacks=list(callbacks), **{**quiet, **keywords})

    return make
