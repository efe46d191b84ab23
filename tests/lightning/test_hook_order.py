"""Hooks of a LightningModule, its DataModule and Callbacks have the same order and arguments with both
Trainers."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from roomier import Trainer
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl

STAGES = ("validation", "test", "predict")
MOMENTS = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
SHARED = (
    "setup",
    "teardown",
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    *(f"on_{stage}_{moment}" for stage in STAGES for moment in MOMENTS),
)
OF_MODULE = (
    *SHARED,
    *TRANSFER,
    "configure_callbacks",
    "prepare_data",
    "configure_model",
    "configure_optimizers",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_validation_model_zero_grad",
    *(f"on_{stage}_model_eval" for stage in STAGES),
    "on_validation_model_train",
    "on_test_model_train",
)
OF_CALLBACK = (*SHARED, "on_sanity_check_start", "on_sanity_check_end", "on_exception")
OF_DATA = (*TRANSFER, *LOADERS, "prepare_data", "setup", "teardown")


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.net(batch).mean(), "more": batch}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log(f"value{dataloader_idx or ''}", self.net(batch).mean(), add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("value", self.net(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [
            {"scheduler": StepLR(optimizer, 1), "interval": "step"},
            {"scheduler": StepLR(optimizer, 1), "interval": "epoch"},
            {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "value"},
        ]


class OneRate(Plain):
    """Module without schedulers, for runs that log no metrics."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.net(batch).mean())
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def batches(num_batches: int) -> DataLoader[Any]:
    return DataLoader([torch.ones(2, 4) for _ in range(num_batches)], batch_size=None)  # type: ignore[arg-type]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return batches(5)

    def val_dataloader(self) -> Any:
        return batches(2)

    test_dataloader = predict_dataloader = val_dataloader


def shown(name: str, value: Any) -> str:
    """Return the part of an argument that is compared: the value if the value is plain, otherwise the type."""
    if name == "stage":
        return str(getattr(value, "value", value))
    if name == "gradient_clip_algorithm":  # roomier passes the default instead of None
        return "" if value is None else str(getattr(value, "value", value)).replace("norm", "")
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    if isinstance(value, LRScheduler):
        return "scheduler"
    if isinstance(value, Optimizer) or hasattr(value, "param_groups"):
        return "optimizer" if type(value).__module__.startswith("torch.") else "wrapped optimizer"
    if isinstance(value, dict):
        return repr({key: type(each).__name__ for key, each in value.items()})
    return "callable" if inspect.isroutine(value) or type(value).__name__ == "Closure" else type(value).__name__


def recording(base: type, names: Any, mark: str, seen: list[str]) -> Any:
    """Return an instance of a subclass of ``base`` that records calls of ``names`` with their arguments."""

    def noting(name: str) -> Callable[..., Any]:
        inherited = getattr(base, name)
        signature = inspect.signature(inherited)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = list(signature.bind(self, *args, **kwargs).arguments.items())[1:]
            seen.append(f"{mark}.{name}({', '.join(shown(key, value) for key, value in arguments)})")
            return inherited(self, *args, **kwargs)

        return hook

    return type(f"Recording{mark}", (base,), {name: noting(name) for name in names})()


def calls(
    kind: Any, verb: str, folder: Any, *, base: type = Plain, data: str = "loaders", **keywords: Any
) -> list[str]:
    """Return the hooks of one run in order."""
    seen: list[str] = []
    module = recording(base, OF_MODULE, "module", seen)
    callback = recording(pl.Callback, OF_CALLBACK, "callback", seen)
    trainer = make_trainer(kind, folder, callbacks=[callback], **keywords)
    if data == "module":
        given: dict[str, Any] = {"datamodule": recording(Data, OF_DATA, "data", seen)}
    elif verb == "fit":
        given = {"train_dataloaders": batches(5), "val_dataloaders": batches(2)}
    else:
        given = {"dataloaders": batches(2)}
    if data == "many loaders":
        given["val_dataloaders" if verb == "fit" else "dataloaders"] = [batches(1), batches(2)]
    if kind is Trainer:
        getattr(trainer, verb)(module, **given)
    else:
        with quiet_lightning():
            getattr(trainer, verb)(module, **given)
    return seen


class LeavesOut(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in (0, 3) else super().training_step(batch, batch_idx)


FITS = {
    "some steps return None": {"max_steps": 7, "base": LeavesOut},
    "two epochs": {"max_epochs": 2},
    "accumulated and clipped": {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "validated within the epoch": {"max_epochs": 1, "val_check_interval": 2, "num_sanity_val_steps": 0},
    "validated every second epoch": {"max_epochs": 2, "check_val_every_n_epoch": 2, "base": OneRate},
    "ended within an epoch": {"max_steps": 3},
    "several validation loaders": {"max_epochs": 1, "data": "many loaders"},
    "manual optimization": {"max_epochs": 1, "base": ByHand},
    "one batch of each": {"fast_dev_run": True},
    "no validation": {"max_epochs": 1, "limit_val_batches": 0, "base": OneRate},
}


@pytest.mark.parametrize("keywords", FITS.values(), ids=FITS)
def test_hooks_of_a_fit(tmp_path, keywords):
    expected, seen = (calls(kind, "fit", tmp_path, **keywords) for kind in (pl.Trainer, Trainer))
    assert len(expected) > 30
    assert seen == expected


def test_hooks_of_a_fit_with_a_data_module(tmp_path):
    """Loaders are created before ``on_fit_start``, because planning and resuming require the data."""
    expected, seen = (calls(kind, "fit", tmp_path, data="module", max_epochs=1) for kind in (pl.Trainer, Trainer))
    asked = [f"data.{name}()" for name in LOADERS]
    assert [each for each in seen if each not in asked] == [each for each in expected if each not in asked]
    assert sorted(each for each in seen if each in asked) == sorted(each for each in expected if each in asked)
    assert seen.index("data.val_dataloader()") < seen.index("module.on_fit_start()")


@pytest.mark.parametrize("data", ["loaders", "module", "many loaders"])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_hooks_of_an_evaluation(tmp_path, capsys, verb, data):
    base = (
        type(
            "Many",
            (Plain,),
            {
                name: lambda self, batch, batch_idx, dataloader_idx=0: self.net(batch)
                for name in ("test_step", "predict_step")
            },
        )
        if data == "many loaders"
        else Plain
    )
    expected, seen = (calls(kind, verb, tmp_path, data=data, base=base) for kind in (pl.Trainer, Trainer))
    assert len(expected) > 15
    assert seen == expected


def test_hooks_of_a_skipped_epoch(tmp_path):
    """If ``on_train_batch_start`` returns -1, the epoch ends."""

    class LeavesOut(Plain):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 3 else None

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [StepLR(optimizer, 1)]

    expected, seen = (calls(kind, "fit", tmp_path, base=LeavesOut, max_epochs=2) for kind in (pl.Trainer, Trainer))
    assert seen == expected


def test_hooks_after_an_error(tmp_path):
    class Fails(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError(batch_idx)

    of_both = []
    for kind in (pl.Trainer, Trainer):
        seen: list[str] = []
        callback = recording(pl.Callback, OF_CALLBACK, "callback", seen)
        trainer = make_trainer(kind, tmp_path, callbacks=[callback], max_epochs=1)
        with pytest.raises(KeyError), quiet_lightning():
            trainer.fit(Fails(), batches(2))
        of_both.append(seen)
    of_lightning, of_roomier = of_both
    assert of_lightning[-1] == "callback.on_exception(Trainer, Fails, KeyError)"
    # the teardown hook releases resources of setup
    assert of_roomier == [*of_lightning, "callback.teardown(Trainer, Fails, fit)"]


def test_callbacks_with_a_monitor_run_last_at_the_end_of_an_epoch(tmp_path):
    """EarlyStopping and ModelCheckpoint read the values that the module's hook logs, at any position in the list."""

    class LogsLate(OneRate):
        def on_train_epoch_end(self) -> None:
            self.log("late", float(self.current_epoch))

    for kind in (pl.Trainer, Trainer):
        stopper = pl.callbacks.EarlyStopping("late", mode="min", patience=1)
        trainer = make_trainer(kind, tmp_path, callbacks=[stopper], max_epochs=5, limit_val_batches=0)
        with quiet_lightning():
            trainer.fit(LogsLate(), batches(2))
        assert trainer.current_epoch == 2
