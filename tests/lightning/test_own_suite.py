"""Behaviors that Lightning's own tests require, with both Trainers."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, default_collate

import roomier
from roomier import Trainer
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import Regression, Stream, in_order, pl, samples

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


def test_arguments_set_between_runs_are_no_longer_implied() -> None:
    trainer = Trainer(max_steps=10)
    trainer.max_steps = -1
    assert trainer.max_epochs is None
    trainer = Trainer(fast_dev_run=True, max_epochs=5, limit_val_batches=7)
    trainer.min_epochs = 2
    assert (trainer.max_epochs, trainer.limit_val_batches) == (1, 1)
    trainer.fast_dev_run = False
    assert (trainer.max_epochs, trainer.limit_val_batches, trainer.min_epochs) == (5, 7, 2)


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


def test_a_function_is_no_scheduler_of_manual_optimization(tmp_path: Path) -> None:
    class Manual(Regression):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1)], [lambda epoch: 0.5]

    with pytest.raises(roomier.RoomierError, match="is not a scheduler"):
        make_trainer(Trainer, tmp_path, max_epochs=1).fit(Manual(), in_order(2))


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


class OwnRegression(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def loss(self, batch: Any) -> Any:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Configured(roomier.Module):
    def __init__(self, config: Any, named: Any = None, listed: Any = ()) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(config.net.sizes[0], config.out)
        self.found = [each.net.sizes[1] for each in (config, *([] if named is None else [named["config"]]), *listed)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfOneConfig(Configured):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.save_hyperparameters(config)


def test_omegaconf_hyperparameters_are_loaded_with_attributes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = OmegaConf.create({"net": {"sizes": [4, 3]}, "out": "${net.sizes.1}"})
    modules = Configured(config, named={"config": config}, listed=[config]), OfOneConfig(config)
    for module, num_found in zip(modules, (3, 1), strict=True):
        trainer = make_trainer(Trainer, tmp_path, max_steps=1)
        trainer.fit(module, in_order(1))
        trainer.save_checkpoint(tmp_path / type(module).__name__)
        loaded = type(module).load_from_checkpoint(tmp_path / type(module).__name__)
        assert (loaded.net.out_features, loaded.found) == (3, [3] * num_found)
    assert "checkpoints do not contain it" not in capsys.readouterr().err
    Configured(OmegaConf.create({"net": {"sizes": [4, 3]}, "out": 1, "lr": "???"}))
    assert "hyperparameter 'config' of Configured is a DictConfig, so checkpoints do not" in capsys.readouterr().err


@KINDS
def test_attributes_after_a_fit(kind: Any, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("failed")

    with quiet_lightning():
        trainer = make_trainer(kind, tmp_path, max_epochs=2)
        trainer.fit(Regression(), in_order(3))
        assert (trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx) == (2, 5)
        assert not trainer.interrupted
        trainer = make_trainer(kind, tmp_path, callbacks=[pl.callbacks.LambdaCallback(on_test_start=fail)])
        module = Regression()
        module.test_step = module.validation_step
        with pytest.raises(ValueError, match="failed"):
            trainer.test(module, in_order(1))
    assert trainer.interrupted


@KINDS
@pytest.mark.parametrize("is_returned", [True, False])
def test_predictions_in_the_loop(kind: Any, tmp_path: Path, is_returned: bool) -> None:
    class Predicts(Regression):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch_idx

        def on_predict_epoch_end(self) -> None:
            self.seen = list(self.trainer.predict_loop.predictions), self.trainer.predict_loop.epoch_batch_indices

    class Writes(pl.callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            pl_module.indices = indices

    module, expected = Predicts(), [0, 1] if is_returned else []
    with quiet_lightning():
        trainer = make_trainer(kind, tmp_path, callbacks=[Writes("batch")])
        found = trainer.predict(module, in_order(2), return_predictions=is_returned)
    assert found == (expected if is_returned else None)
    assert trainer.predict_loop.predictions == expected
    assert module.seen == (expected, [[]])
    assert module.indices == [4, 5, 6, 7]


def test_a_stop_before_the_minimum_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stops(Regression):
        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = True

    trainer = make_trainer(Trainer, tmp_path, min_epochs=3, max_epochs=5)
    trainer.fit(Stops(), in_order(1))
    assert trainer.current_epoch == 3
    assert capsys.readouterr().err.count("training continues until min_epochs=3 is reached") == 1


@KINDS
def test_rates_of_a_group_that_is_added_continue(kind: Any, tmp_path: Path) -> None:
    class Adds(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})

    monitor = (pl.callbacks if kind is pl.Trainer else roomier.callbacks).LearningRateMonitor("epoch")
    with quiet_lightning():
        logger = pl.loggers.CSVLogger(tmp_path)
        make_trainer(kind, tmp_path, max_epochs=3, logger=logger, callbacks=[Adds(), monitor]).fit(
            Regression(), in_order(1)
        )
    assert monitor.lrs == {"lr-AdamW/pg1": [0.05] * 3, "lr-AdamW/pg2": [0.5] * 2}


@KINDS
@pytest.mark.parametrize(("rates", "expected"), [([0.2, 0.3], [0.2, 0.3]), (0.2, [0.2, 0.2])])
def test_initial_rates_of_stochastic_weight_averaging(kind: Any, tmp_path: Path, rates: Any, expected: Any) -> None:
    class Groups(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            groups = self.trainer.optimizers[0].param_groups
            self.found = [[group[name] for group in groups] for name in ("lr", "initial_lr", "swa_lr")]
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": 0.1}]
            return torch.optim.SGD(groups, lr=0.05)

    module, averaging = Groups(), pl.callbacks.StochasticWeightAveraging(rates, swa_epoch_start=1)
    with quiet_lightning():
        make_trainer(kind, tmp_path, max_epochs=1, callbacks=[averaging]).fit(module, in_order(1))
    assert module.found == [[0.05, 0.1], expected, expected]


@pytest.mark.parametrize("base", [pytest.param(pl.LightningDataModule, id="lightning"), roomier.DataModule])
def test_a_data_module_shows_its_sizes(base: Any) -> None:
    class Data(base):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            self.train = in_order(2)

        def train_dataloader(self) -> Any:
            return self.train

        def val_dataloader(self) -> Any:
            return [in_order(1), DataLoader(Stream())]

    data = Data()
    others = "{Validation dataloader: 1. size=4 ; 2. size=NA}\n{Test dataloader: None}\n{Predict dataloader: None}"
    assert str(data) == "{Train dataloader: None}\n" + others
    data.setup("fit")
    assert str(data) == "{Train dataloader: size=8}\n" + others


def without_even_batches(kept: list[int]) -> Any:
    """Return a function that collates samples to None if their number in ``kept`` is even."""

    def collate(samples: Any) -> Any:
        kept.append(len(kept) % 2)
        return default_collate(samples) if kept[-1] else None

    return collate


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        pytest.param(pl.Trainer, Regression, marks=pytest.mark.more, id="lightning"),
        pytest.param(Trainer, Regression, id="roomier"),
        pytest.param(Trainer, OwnRegression, id="own"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_is_none_is_skipped(kind: Any, base: Any, tmp_path: Path, accumulate: int) -> None:
    class Counts(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.indices: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.indices.append(batch_idx)
            return self.loss(batch)

    module = Counts()
    loader = DataLoader(samples(4), 4, collate_fn=without_even_batches([]))
    with quiet_lightning():
        trainer = make_trainer(kind, tmp_path, max_epochs=1, accumulate_grad_batches=accumulate)
        trainer.fit(module, loader)
    assert module.indices == [1, 3]
