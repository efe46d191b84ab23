"""A run of a LightningModule that is stopped and resumed equals an uninterrupted run bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier.callbacks import ModelCheckpoint
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl

SAVED_AT = 7  # within an epoch of 5 batches


class Automatic(pl.LightningModule):
    """Module with dropout, schedulers per step and per epoch, a torchmetrics object, and additional state in
    checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.mean = torchmetrics.MeanMetric()
        self.num_seen = 0
        self.losses: list[float] = []
        self.figures: list[dict[str, float]] = []

    def loss(self, batch):
        return (self.net(batch[0]) + 0.1 * torch.randn(())).square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.num_seen += 1
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.losses.append(float(loss))
        return loss

    def on_train_epoch_end(self):
        self.figures.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["num_seen"] = self.num_seen

    def on_load_checkpoint(self, checkpoint):
        self.num_seen = checkpoint["num_seen"]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        of_steps = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9), "interval": "step"}
        of_epochs = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return [optimizer], [of_steps, of_epochs]


class Manual(Automatic):
    """Module with two optimizers and their schedulers, and manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        for index, optimizer in enumerate(self.optimizers()):
            loss = super().training_step(batch, batch_idx) if index == 0 else self.other(batch[0]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.net.parameters(), lr=0.05)
        second = torch.optim.SGD(self.other.parameters(), lr=0.05, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in (first, second)]


class Counts(pl.Callback):
    """A Lightning callback with a state."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.num_batches += 1

    def state_dict(self):
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict):
        self.num_batches = state_dict["num_batches"]


class Data(pl.LightningDataModule):
    """DataModule with shuffled data and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.num_moved = 0

    def train_dataloader(self):
        data = TensorDataset(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
        return DataLoader(data, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(6, 3)), batch_size=3)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.num_moved += self.trainer.training
        return batch

    def state_dict(self):
        return {"num_moved": self.num_moved}

    def load_state_dict(self, state_dict):
        self.num_moved = state_dict["num_moved"]


def run(kind: Any, folder: Path, num_steps: int, ckpt_path: Path | None = None, save: bool = False) -> Any:
    torch.manual_seed(0)
    module, data, counts = kind(), Data(), Counts()
    keywords: dict[str, Any] = {"max_epochs": 4, "callbacks": [counts]}
    if save:
        checkpoint = ModelCheckpoint(dirpath=folder, every_n_train_steps=num_steps, save_top_k=-1, filename="{step}")
        keywords |= {"max_steps": num_steps, "callbacks": [counts, checkpoint], "enable_checkpointing": True}
    with quiet_lightning():
        trainer = roomier.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **{"enable_checkpointing": False, **keywords},
        )
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, data, counts, trainer


@pytest.mark.parametrize(("kind", "steps_of_a_batch"), [(Automatic, 1), (Manual, 2)])
def test_resumed_run_equals_an_uninterrupted_run(tmp_path, kind, steps_of_a_batch):
    whole, whole_data, whole_counts, whole_trainer = run(kind, tmp_path / "whole", 0)
    run(kind, tmp_path / "first", SAVED_AT * steps_of_a_batch, save=True)
    [path] = (tmp_path / "first").glob("*step=*")
    resumed, data, counts, trainer = run(kind, tmp_path / "second", 0, ckpt_path=path)
    assert resumed.losses == whole.losses[SAVED_AT:]
    assert resumed.figures == whole.figures[1:]
    for own, expected in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(own, expected)
    assert resumed.num_seen == whole.num_seen == 20
    assert counts.num_batches == whole_counts.num_batches == 20
    assert data.num_moved == whole_data.num_moved
    assert trainer.global_step == whole_trainer.global_step == 20 * steps_of_a_batch
    rates = [[group["lr"] for each in t.optimizers for group in each.param_groups] for t in (trainer, whole_trainer)]
    assert rates[0] == rates[1]
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        name: float(value) for name, value in whole_trainer.callback_metrics.items()
    }


def test_second_fit_continues_with_the_weights(tmp_path):
    """Two fits with one Trainer, as in Lightning: training continues only if the limits of the Trainer allow it."""
    found = []
    for kind in (roomier.Trainer, pl.Trainer):
        torch.manual_seed(0)
        module = Automatic()
        with quiet_lightning():
            for _ in range(2):
                make_trainer(kind, tmp_path, max_epochs=1).fit(module, datamodule=Data())
        found.append((len(module.losses), module.num_seen))
    assert found == [(10, 10), (10, 10)]
