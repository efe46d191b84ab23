"""Attributes of the Trainer have Lightning's types and values in every hook of fit, validate, test and predict."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import roomier
from roomier.core.errors import RoomierError
from roomier.trainer.keywords.arguments import FORMER_ARGUMENTS, FORMER_KEYWORDS, HARMLESS_KEYWORDS
from tests.covering import few
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl

NAMES = [
    *("callback_metrics", "logged_metrics", "progress_bar_metrics", "current_epoch", "global_step", "max_epochs"),
    *("max_steps", "min_epochs", "min_steps", "num_training_batches", "num_val_batches", "num_sanity_val_batches"),
    *("num_test_batches", "num_predict_batches", "limit_train_batches", "limit_val_batches", "limit_test_batches"),
    *("limit_predict_batches", "overfit_batches", "fast_dev_run", "estimated_stepping_batches", "optimizers"),
    *("lr_scheduler_configs", "checkpoint_callback", "checkpoint_callbacks", "early_stopping_callback"),
    *("early_stopping_callbacks", "progress_bar_callback", "logger", "loggers", "log_dir", "train_dataloader"),
    *("val_dataloaders", "test_dataloaders", "predict_dataloaders", "lightning_module", "model", "barebones"),
    *("accumulate_grad_batches", "gradient_clip_val", "training", "validating", "testing", "predicting"),
    *("sanity_checking", "evaluating", "interrupted", "should_stop", "ckpt_path", "world_size", "global_rank"),
    *("local_rank", "node_rank", "num_nodes", "is_global_zero", "precision", "num_devices", "device_ids"),
    *("is_last_batch", "datamodule", "received_sigterm", "val_check_interval", "check_val_every_n_epoch"),
    *("log_every_n_steps", "num_sanity_val_steps", "enable_validation", "scaler"),
    "reload_dataloaders_every_n_epochs",
]
STAGES = ("validation", "test", "predict")
MOMENTS = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
HOOKS = [
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start"),
    *("on_train_batch_end", "on_before_optimizer_step"),
    *(f"on_{stage}_{moment}" for stage in STAGES for moment in MOMENTS),
]

# Attributes that differ, and the reasons. KNOWN_EARLIER: Lightning sets these attributes later, or clears them earlier.
KNOWN_EARLIER = {"num_val_batches", "num_sanity_val_batches", "val_dataloaders", "train_dataloader", "test_dataloaders"}
KNOWN_LATER = {"enable_validation"}  # after the loaders are created
ANYWAY = {"log_dir"}  # in roomier the run folder, with and without a logger


def plain(value: Any) -> Any:
    """Return the type and the value, without parts that differ between objects."""
    if isinstance(value, Tensor):
        return str(value.dtype), round(float(value), 5)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float, round(value, 5)
    return value if isinstance(value, (int, str, bool, type(None))) else type(value).__name__


def recorder() -> Any:
    class Recorder(pl.Callback):
        def __init__(self) -> None:
            self.rows: list[tuple[str, dict[str, Any]]] = []

        def see(self, hook: str, trainer: Any) -> None:
            row: dict[str, Any] = {}
            for name in NAMES:
                try:
                    row[name] = plain(getattr(trainer, name))
                except pl.utilities.exceptions.MisconfigurationException:  # raised by Lightning's Trainer
                    row[name] = "not to be had"
            state = trainer.state
            row["state"] = [None if each is None else each.value for each in (state.fn, state.stage, state.status)]
            device = trainer.strategy.root_device
            row["strategy"] = [str(device), trainer.strategy.world_size if hasattr(trainer, "run") else 1]
            self.rows.append((hook, row))

    for hook in HOOKS:
        setattr(Recorder, hook, lambda self, trainer, *rest, hook=hook, **more: self.see(hook, trainer))
    return Recorder()


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def loss(self, batch: Any) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_epoch=True)
        self.log("rate", 0.1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def loader(num_batches: int) -> Any:
    torch.manual_seed(num_batches)
    return DataLoader([(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(num_batches)], batch_size=None)


def record(kind: Any, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    torch.manual_seed(1)
    module, callback = Net(), recorder()
    trainer = make_trainer(
        kind,
        folder,
        callbacks=[callback],
        max_epochs=2,
        log_every_n_steps=2,
        limit_train_batches=4,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )
    callback.see("made", trainer)
    trainer.fit(module, loader(5), loader(3))
    callback.see("after fit", trainer)
    for name in ("validate", "test", "predict"):
        getattr(trainer, name)(module, loader(2))
        callback.see(f"after {name}", trainer)
    return callback.rows


def test_attributes_equal_lightning_in_every_hook(tmp_path: Path) -> None:
    with quiet_lightning():
        lightnings = record(pl.Trainer, tmp_path / "lightning")
        rows = record(roomier.Trainer, tmp_path / "roomier")
    assert [hook for hook, _ in rows] == [hook for hook, _ in lightnings]
    differing = []
    for (hook, own), (_, theirs) in zip(rows, lightnings, strict=True):
        for name, value in theirs.items():
            if name in ANYWAY or own[name] == value:
                continue
            if name in KNOWN_EARLIER and value in (None, [], "not to be had"):
                continue
            if name in KNOWN_LATER and hook in ("setup", "on_fit_start") and value is True:
                continue
            if name == "num_training_batches" and hook == "setup":
                continue  # Lightning's value depends on earlier reads of estimated_stepping_batches
            if name == "estimated_stepping_batches" and value in (-1, "not to be had"):
                continue  # if Lightning has no training data yet
            differing.append((hook, name, own[name], value))
    assert not differing, "\n".join(map(str, differing))


KEYWORDS = set(inspect.signature(roomier.Trainer.__init__).parameters)
THEIRS = inspect.signature(pl.Trainer.__init__).parameters
OTHER_DEFAULT = {  # with reasons
    "strategy": None,  # in Lightning, "auto" depends on the number of devices; in roomier, "auto" is the fastest plan
    "num_nodes": "auto",  # the number that a launcher started
    "precision": "32-true",  # the meaning of None
    # None is the default
    "logger": True,
    "num_sanity_val_steps": 2,
    "log_every_n_steps": 50,
    **{f"enable_{what}": True for what in ("checkpointing", "progress_bar", "model_summary")},
}


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "self"])
def test_each_argument_of_lightning_has_the_same_meaning_or_a_message(name: str) -> None:
    default = THEIRS[name].default
    if name in KEYWORDS:
        own = inspect.signature(roomier.Trainer.__init__).parameters[name].default
        assert own == OTHER_DEFAULT.get(name, default)
        return
    assert name in FORMER_KEYWORDS
    assert HARMLESS_KEYWORDS[name] == default
    roomier.Trainer(accelerator="cpu", **{name: default})
    with pytest.raises(RoomierError, match=name) as caught:
        roomier.Trainer(**{name: object()})
    assert caught.value.action


def test_none_requests_the_default_as_in_lightning() -> None:
    names = [name for name in THEIRS if THEIRS[name].default is None and name in KEYWORDS]
    trainer = roomier.Trainer(accelerator="cpu", **dict.fromkeys(names))
    assert (trainer.num_sanity_val_steps, trainer.log_every_n_steps, trainer.precision) == (2, 50, "32-true")
    assert trainer.logger_is_on
    assert trainer.enable_checkpointing
    assert trainer.progress_bar_callback is not None


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict", "save_checkpoint"])
def test_methods_have_the_arguments_of_lightning_in_order(name: str) -> None:
    own = inspect.signature(getattr(roomier.Trainer, name)).parameters
    theirs = inspect.signature(getattr(pl.Trainer, name)).parameters
    positional = [each.name for each in own.values() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)
    assert {each: own[each].default for each in theirs} == {each: theirs[each].default for each in theirs}
    assert not FORMER_ARGUMENTS.keys() & own.keys()


def test_metrics_set_by_a_callback_are_visible_to_the_next(make_trainer: Any) -> None:
    seen: list[Any] = []

    class Adds(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.callback_metrics["score"] = torch.tensor(0.25)
            trainer.progress_bar_metrics.update(pace=3.0)

    class Reads(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append((trainer.callback_metrics["score"], trainer.progress_bar_metrics["pace"]))

    trainer = make_trainer(max_epochs=1, callbacks=[Adds(), Reads()])
    trainer.fit(Net(), loader(2))
    assert seen == [(0.25, 3.0)]
    trainer.validate(Net(), loader(2), verbose=False)
    assert "score" not in trainer.callback_metrics


def test_loop_settings_can_be_set_between_fits_but_not_within(make_trainer: Any) -> None:
    class Sets(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.max_epochs = 7

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Net(), loader(4))
    trainer.max_epochs, trainer.limit_train_batches, trainer.accumulate_grad_batches = 2, 2, 2
    trainer.fit(Net(), loader(4))
    assert (trainer.current_epoch, trainer.num_training_batches, trainer.global_step) == (2, 2, 2)
    with pytest.raises(RoomierError, match="limit_val_batches"):
        trainer.limit_val_batches = 1.5
    trainer.callbacks.append(Sets())
    with pytest.raises(RoomierError, match="cannot be changed during a run"):
        trainer.fit(Net(), loader(4))


def test_unsupported_attributes_name_a_replacement() -> None:
    trainer = roomier.Trainer(accelerator="cpu")
    assert not hasattr(trainer, "validate_loop")
    with pytest.raises(AttributeError, match="Read num_val_batches"):
        _ = trainer.validate_loop


def test_assigned_ckpt_path_is_used_by_calls_without_one(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Net(), loader(2))
    trainer.save_checkpoint(tmp_path / "saved")
    trainer.ckpt_path = tmp_path / "saved"
    fresh, other = Net(), Net()
    trainer.test(fresh, loader(2), verbose=False)
    assert torch.equal(fresh.layer.weight, trainer.fitted.module.network.layer.weight)
    assert str(trainer.ckpt_path) == str(tmp_path / "saved")
    trainer.ckpt_path = None
    before = other.layer.weight.detach().clone()
    trainer.test(other, loader(2), verbose=False)
    assert torch.equal(other.layer.weight, before)
    assert trainer.ckpt_path is None


class Joined(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(next(iter(batch.values())), batch_idx)


@pytest.mark.parametrize("limit", few([0.5, None, 2]))
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_each_combined_loader_has_a_number_of_batches(tmp_path: Path, mode: Any, limit: Any) -> None:
    found = []
    for kind in (pl.Trainer, roomier.Trainer):
        with quiet_lightning():
            trainer = make_trainer(kind, tmp_path, limit_val_batches=limit)
            pair = pl.utilities.CombinedLoader({"a": loader(5), "b": loader(3)}, mode)
            trainer.validate(Joined(), pair, verbose=False)
        found.append((trainer.num_val_batches, float(trainer.callback_metrics["val_loss"])))
    (theirs, their_loss), (own, own_loss) = found
    assert own == theirs
    assert own_loss == pytest.approx(their_loss)
