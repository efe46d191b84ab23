"""LightningModules are planned like roomier Modules. In a dry run, their steps can log and use the Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.callbacks import MemoryForecast
from roomier.core.errors import RoomierError
from tests.covering import few

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Logs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean() / (1 + self.current_epoch)
        self.log("loss", loss, prog_bar=True)
        assert self.trainer.world_size == 1
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, steps)]


class StepsItself(Logs):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class WithoutOptimizer(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(256, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(64, 256)), batch_size=16)


def trainer(**keywords: Any) -> roomier.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return roomier.Trainer(strategy="auto", accelerator="cpu", max_steps=3, **quiet, **keywords)


@pytest.mark.parametrize("kind", few([Logs, StepsItself]))
def test_forecast_of_a_lightning_module_equals_its_run(kind: type) -> None:
    forecast, model = MemoryForecast(), kind()
    trainer(callbacks=[forecast]).fit(model, loader())
    record = forecast.record
    assert record is not None
    assert record.worst.peak.phase == "update"
    assert abs(record.forecast_bytes - record.measured_bytes) <= 16
    assert type(model) is kind


def test_error_in_every_plan_is_reported_once() -> None:
    with pytest.raises(RoomierError, match="configures no optimizer") as caught:
        trainer().fit(WithoutOptimizer(), loader())
    assert "every plan is rejected" not in str(caught.value)
