"""Loaders that are created again every few epochs, compared with Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from roomier import RoomierError, Trainer
from tests.lightning.modules import Regression, pl, samples
from tests.lightning.rows import run_with

pytestmark = pytest.mark.more


class Grows(Regression):
    """Module whose number of batches increases with the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def train_dataloader(self) -> Any:
        self.calls.append(("train", self.current_epoch))
        return DataLoader(samples(3 + self.current_epoch, seed=self.current_epoch), 4)

    def val_dataloader(self) -> Any:
        self.calls.append(("val", self.current_epoch))
        return DataLoader(samples(1 + self.current_epoch), 4)


class InDataModule(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        self.calls.append(epoch)
        return DataLoader(samples(2 + epoch, seed=epoch), 4)


@pytest.mark.parametrize("interval", [0, 1, 2, 3])
def test_loaders_are_created_in_the_same_epochs(interval: int, tmp_path: Path) -> None:
    runs = []
    for kind in (Trainer, pl.Trainer):
        torch.manual_seed(1)
        module, data = Grows(), InDataModule()
        keywords: dict[str, Any] = {"max_epochs": 5, "reload_dataloaders_every_n_epochs": interval}
        keywords["num_sanity_val_steps"] = 0
        trainer, _, _ = run_with(kind, lambda t, m: t.fit(m), lambda: module, tmp_path, **keywords)  # noqa: B023
        run_with(kind, lambda t, m: t.fit(m, datamodule=data), Regression, tmp_path, **keywords)  # noqa: B023
        runs.append((trainer.global_step, sorted(module.calls), data.calls, list(module.parameters())))
    (own_step, own_calls, own_data, own), (step, calls, of_data, other) = runs
    assert (own_step, own_calls, own_data) == (step, calls, of_data)
    assert len(of_data) == (1 if interval == 0 else -(-5 // interval))
    for each, expected in zip(own, other, strict=True):
        torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("stops_at", [5, 7, 9])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_resumed_run_reads_the_same_batches(stops_at: int, interval: int, tmp_path: Path) -> None:
    class Sums(Grows):
        def __init__(self) -> None:
            super().__init__()
            self.sums: list[float] = []

        def train_dataloader(self) -> Any:
            epoch = self.current_epoch - self.current_epoch % interval
            return DataLoader(samples(4, seed=epoch), 4)

        val_dataloader = None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.sums.append(float(batch[0].sum()))
            return super().training_step(batch, batch_idx)

    def fit(module: Any, path: Any = None, **keywords: Any) -> Trainer:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(
            accelerator="cpu",
            default_root_dir=tmp_path,
            reload_dataloaders_every_n_epochs=interval,
            **quiet,
            **keywords,
        )
        trainer.fit(module, ckpt_path=path)
        return trainer

    whole, first, rest = Sums(), Sums(), Sums()
    fit(whole, max_epochs=4)
    fit(first, max_steps=stops_at).save_checkpoint(tmp_path / "c")
    fit(rest, tmp_path / "c", max_epochs=4)
    assert first.sums + rest.sums == whole.sums
    assert len(set(whole.sums)) == 4 * (4 // interval)


def test_a_negative_number_of_epochs_is_rejected() -> None:
    with pytest.raises(RoomierError, match="reload_dataloaders_every_n_epochs"):
        Trainer(reload_dataloaders_every_n_epochs=-1)
