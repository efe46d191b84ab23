"""Export methods of a LightningModule, called after roomier trained it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from roomier import Trainer

pytestmark = pytest.mark.more


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.hooks: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.line(x)
        return out

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with self.trainer.profiler.profile("square"):
            return self(batch).square().mean()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooks.append("module")
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Points(pl.LightningDataModule):
    hooks = 0

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 2), 2)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.hooks += 1
        return batch


def trained(make_trainer: Any, data: Any) -> Line:
    module = Line()
    make_trainer(max_epochs=1).fit(module, **data)
    module.hooks.clear()
    return module


@pytest.mark.filterwarnings("ignore")  # warnings of the exporters
def test_export_methods_after_a_fit(make_trainer: Any, tmp_path: Path) -> None:
    module = trained(make_trainer, {"train_dataloaders": [torch.ones(2, 2)] * 2})
    module.to_onnx(tmp_path / "line.onnx", torch.ones(3, 2), dynamo=True)
    assert (tmp_path / "line.onnx").stat().st_size > 100
    assert module.hooks == ["module"]
    traced = module.to_torchscript(method="trace", example_inputs=torch.ones(3, 2))
    assert torch.equal(traced(torch.ones(5, 2)), module(torch.ones(5, 2)))


@pytest.mark.filterwarnings("ignore")
def test_hooks_of_the_data_module_take_precedence(make_trainer: Any, tmp_path: Path) -> None:
    data = Points()
    module = trained(make_trainer, {"datamodule": data})
    before = data.hooks
    module.to_onnx(tmp_path / "line.onnx", torch.ones(3, 2), dynamo=True)
    assert (data.hooks - before, module.hooks) == (1, [])
    assert isinstance(module.trainer, Trainer)
