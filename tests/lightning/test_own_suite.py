"""Behaviors that Lightning's own tests require, with both Trainers."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import roomier
from roomier import Trainer
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import Regression, in_order, pl, samples

OF_LIGHTNING = pytest.param(pl.Trainer, marks=pytest.mark.more, id="lightning")
KINDS = pytest.mark.parametrize("kind", [OF_LIGHTNING, pytest.param(Trainer, id="roomier")])


class Validated(Regression):
    """Module that records the global step of each validation."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_validation_start(self) -> None:
        self.steps.append(self.trainer.global_step)


@KINDS
@pytest.mark.parametrize(
    ("keywords", "steps"),
    [
        ({"val_check_interval": timedelta(microseconds=1)}, [1, 2, 3, 4]),
        ({"val_check_interval": {"microseconds": 1}, "check_val_every_n_epoch": None}, [1, 2, 3, 4]),
        ({"val_check_interval": {"microseconds": 1}, "check_val_every_n_epoch": 2}, [3, 4]),
        ({"val_check_interval": "00:01:00:00"}, []),
        ({"val_check_interval": "00:01:00:00", "fast_dev_run": 2}, [2]),
        ({"val_check_interval": 100, "check_val_every_n_epoch": 5, "fast_dev_run": 2}, [2]),
    ],
)
def test_interval_of_validations(kind: Any, tmp_path: Path, keywords: dict[str, Any], steps: list[int]) -> None:
    module, given = Validated(), {"max_epochs": 2, "num_sanity_val_steps": 0, **keywords}
    with quiet_lightning():
        make_trainer(kind, tmp_path, **given).fit(module, in_order(2), in_order(1))
    assert module.steps == steps


def test_interval_that_is_no_duration() -> None:
    with pytest.raises(roomier.RoomierError, match="val_check_interval='often': is not a duration"):
        Trainer(val_check_interval="often")


LIMITS = [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]
SHOWN = ("fast_dev_run", "max_epochs", "max_steps", "num_sanity_val_steps", "check_val_every_n_epoch", *LIMITS)


@pytest.mark.parametrize(
    "keywords",
    [
        {"fast_dev_run": True},
        {"fast_dev_run": 1},
        {"fast_dev_run": 3, "limit_val_batches": 0.5, "check_val_every_n_epoch": 2},
        {"fast_dev_run": 2, "overfit_batches": 4},
        {"num_sanity_val_steps": -1, "max_epochs": 2},
    ],
)
def test_arguments_that_others_imply(tmp_path: Path, keywords: dict[str, Any]) -> None:
    with quiet_lightning():
        expected, shown = (
            {name: getattr(make_trainer(kind, tmp_path, **keywords), name) for name in SHOWN}
            for kind in (pl.Trainer, Trainer)
        )
    assert shown == expected
    assert shown["num_sanity_val_steps"] in (0, 2, math.inf)


class Foreign:
    """Scheduler without torch's interface, which only the module steps."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


@KINDS
@pytest.mark.parametrize("is_foreign", [False, True])
def test_schedulers_of_manual_optimization_need_no_monitor(kind: Any, tmp_path: Path, is_foreign: bool) -> None:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

        def on_train_epoch_end(self) -> None:
            if not is_foreign:
                self.lr_schedulers().step(torch.tensor(0.0))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [(Foreign if is_foreign else ReduceLROnPlateau)(optimizer)]

    with quiet_lightning():
        trainer = make_trainer(kind, tmp_path, max_epochs=2)
        trainer.fit(Manual(), in_order(2))
    assert trainer.global_step == 4


@KINDS
def test_without_a_limit_of_epochs_max_epochs_is_minus_one(kind: Any, tmp_path: Path) -> None:
    with quiet_lightning():
        trainer = make_trainer(kind, tmp_path, max_steps=1)
        trainer.fit(Regression(), in_order(1))
    assert trainer.max_epochs == -1


def test_freeze_returns_the_module() -> None:
    class Frozen(roomier.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

    module = Frozen()
    assert module.freeze() is module
    assert not module.net.weight.requires_grad
    assert module.unfreeze() is module
    assert module.net.weight.requires_grad


class Sized(roomier.DataModule):
    def __init__(self, other: int, batch_size: int = 1) -> None:
        super().__init__()
        self.other, self.batch_size = other, batch_size


def test_from_datasets_passes_the_sizes_that_init_accepts() -> None:
    data = Sized.from_datasets(samples(), batch_size=4, num_workers=2, other=5)
    assert (data.other, data.batch_size, data.train_dataloader().num_workers) == (5, 4, 2)


def test_a_missing_file_of_hyperparameters_is_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Wide(roomier.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(width, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = make_trainer(Trainer, tmp_path, max_steps=1)
    trainer.fit(Wide(4), in_order(1))
    trainer.save_checkpoint(tmp_path / "saved")
    assert Wide.load_from_checkpoint(tmp_path / "saved", hparams_file=tmp_path / "missing.yaml").net.in_features == 4
    assert "missing.yaml' does not exist" in capsys.readouterr().err
