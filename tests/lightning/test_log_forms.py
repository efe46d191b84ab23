"""``self.log`` in all its forms: at each point, ``callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics``
equal Lightning's values."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

import roomier
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl

pytestmark = pytest.mark.more

MOMENTS = (
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_sanity_check_end",
)


class Looks(pl.Callback):
    """Callback that records the metrics that are visible at each point, with types."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = []


def _look(moment: str) -> Any:
    def hook(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
        tables = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen.append((moment, *({name: _plain(value) for name, value in table.items()} for table in tables)))

    return hook


def _plain(value: Any) -> Any:
    return (round(float(value), 5), value.dtype if isinstance(value, torch.Tensor) else type(value))


for moment in MOMENTS:
    setattr(Looks, moment, _look(moment))


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of different sizes, which are the weights of a mean over an epoch."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4 + i % 2, 3, generator=generator), torch.randn(4 + i % 2, 1, generator=generator))
        for i in range(count)
    ]


def seen_under(kind: Any, make_module: Any, folder: Path, val: Any, **keywords: Any) -> list[Any]:
    torch.manual_seed(0)
    module, looks = make_module(), Looks()
    with quiet_lightning():
        trainer = make_trainer(kind, folder, max_epochs=2, log_every_n_steps=1, callbacks=[looks], **keywords)
        trainer.fit(module, DataLoader(batches(), None), val)
    return looks.seen


def check_alike(make_module: Any, folder: Path, val: Any = None, **keywords: Any) -> None:
    val = DataLoader(batches(2), None) if val is None else val
    here = seen_under(roomier.Trainer, make_module, folder, val, **keywords)
    there = seen_under(pl.Trainer, make_module, folder, val, **keywords)
    assert [each[0] for each in here] == [each[0] for each in there]
    for own, expected in zip(here, there, strict=True):
        assert own == expected
    assert any(each[1] for each in there)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def loss(self, batch):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Forms(Net):
    """Module that logs values of all types, with all options, in training and validation steps."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("number", 0.3)
        self.log("integer", torch.tensor(batch_idx))
        self.log("hidden", loss, logger=False, prog_bar=True)
        self.log("double", loss.double(), on_epoch=True)
        self.log("half", loss.bfloat16(), on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_epoch=True)
        self.log("smallest", loss, reduce_fx=min, on_epoch=True)
        self.log("sum", loss, reduce_fx=torch.sum, on_epoch=True)
        self.log("average", loss, reduce_fx="AVG", on_epoch=True, batch_size=3)
        self.log("with graph", loss, enable_graph=True, sync_dist=True)
        self.log("shaped", loss.reshape(1, 1))
        self.log("shared", loss)
        self.log_dict({"one": loss, "two": loss * 2}, on_step=True, on_epoch=True)
        if batch_idx == 1:
            self.log("rare", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("shared", loss)
        self.log("val", loss, prog_bar=True)
        self.log("val both", loss, on_step=True, on_epoch=True)
        self.log("val step", loss, on_step=True, on_epoch=False)


@pytest.mark.parametrize("keywords", [{}, {"val_check_interval": 2, "num_sanity_val_steps": 0}])
def test_forms(tmp_path, keywords):
    check_alike(Forms, tmp_path, **keywords)


class FromHooks(Net):
    """Module that logs in each hook that may log, with default options. Two hooks log ``plain``."""

    def training_step(self, batch, batch_idx):
        self.log("plain", float(batch_idx))
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        pass


for number, name in enumerate(
    (
        *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"),
        *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
        *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
        "on_validation_epoch_end",
    )
):

    def _log_from(self: Any, *_: Any, name: str = name, number: int = number) -> None:
        self.log(f"from {name}", number + self.global_step)
        if name == "on_train_epoch_end":
            self.log("plain", 7.0)

    setattr(FromHooks, name, _log_from)


def test_hooks(tmp_path):
    check_alike(FromHooks, tmp_path)


class Metrics(Net):
    """Module that logs torchmetrics objects separately, in lists and in collections, per step and per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.mse, self.val_mse = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()
        kinds = {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
        self.collection = torchmetrics.MetricCollection(kinds, prefix="train/")
        self.val_collection = self.collection.clone(prefix="val/")
        classes = torchmetrics.classification
        self.classes = torchmetrics.MetricCollection([classes.BinaryPrecision(), classes.BinaryRecall()])
        self.listed = nn.ModuleList([torchmetrics.MeanMetric() for _ in range(2)])

    def training_step(self, batch, batch_idx):
        found, target = self.net(batch[0]), batch[1]
        loss = (found - target).square().mean()
        self.mse(found, target)
        self.log("mse", self.mse, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(self.collection(found, target))
        self.classes(found.sigmoid(), (target > 0).int())
        self.log_dict(self.classes, on_step=False, on_epoch=True)
        for index, metric in enumerate(self.listed):
            metric.update(loss.detach() + index)
        self.log("listed", self.listed[0], on_step=False, on_epoch=True, metric_attribute="listed.0")
        return loss

    def on_train_epoch_end(self):
        self.log("computed", self.listed[1].compute())
        self.listed[1].reset()
        self.collection.reset()

    def validation_step(self, batch, batch_idx):
        found, target = self.net(batch[0]), batch[1]
        self.val_mse(found, target)
        self.log("val_mse", self.val_mse)
        self.val_collection.update(found, target)
        self.log_dict(self.val_collection, prog_bar=True)


def test_metric_objects(tmp_path):
    check_alike(Metrics, tmp_path, val_check_interval=2)


def test_several_loaders_at_the_end_of_a_validation(tmp_path):
    class Several(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            loss = self.loss(batch)
            self.log("val", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)

    class AtTheEnd(pl.Callback):
        def on_fit_end(self, trainer, pl_module):
            self.seen = [
                {name: _plain(value) for name, value in table.items()}
                for table in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
            ]

    found = []
    for kind in (roomier.Trainer, pl.Trainer):
        torch.manual_seed(0)
        looks, loaders = AtTheEnd(), [DataLoader(batches()[:2], None), DataLoader(batches()[2:], None)]
        with quiet_lightning():
            trainer = make_trainer(kind, tmp_path, max_epochs=1, log_every_n_steps=1, callbacks=[looks])
            trainer.fit(Several(), DataLoader(batches(), None), loaders)
        found.append(looks.seen)
    here, there = found
    assert here == there
    assert "val_epoch/dataloader_idx_1" in there[0]


def test_submodule_logs(tmp_path):
    class Child(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 1)

        def forward(self, x):
            self.log("from the child", x.mean())
            return self.net(x)

    class Parent(Net):
        def __init__(self):
            super().__init__()
            self.net = Child()

    trainer = make_trainer(roomier.Trainer, tmp_path, max_epochs=1)
    trainer.fit(Parent(), batches())
    assert float(trainer.callback_metrics["from the child"]) == pytest.approx(float(batches()[-1][0].mean()))


def test_two_names_of_one_column_print_a_notice_in_a_lightning_module(tmp_path, capsys):
    """Lightning keeps the last value."""

    class Overlaps(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def on_train_epoch_end(self):
            self.log("loss_epoch", 5.0)

    trainer = make_trainer(roomier.Trainer, tmp_path, max_epochs=1)
    trainer.fit(Overlaps(), batches())
    assert float(trainer.callback_metrics["loss_epoch"]) == 5.0
    assert "log('loss_epoch'): is written to the column 'loss_epoch', like 'loss'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_fx": torch.median}, r"reduce_fx.*is not a known reduction.*torchmetrics"),
        ({"reduce_fx": lambda values: values[-1]}, r"reduce_fx.*is not a known reduction"),
        ({"name": "x/dataloader_idx_1"}, "must not contain the index of the loader"),
        ({"value": {"a": 1.0}}, "must be a number or a torchmetrics metric"),
        ({"value": torch.ones(2)}, "must be a scalar"),
    ],
)
def test_invalid_values_are_rejected(tmp_path, options, message):
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log(**{"name": "x", "value": loss, **options})
            return loss

    with pytest.raises(roomier.RoomierError, match=message):
        make_trainer(roomier.Trainer, tmp_path, max_epochs=1).fit(Logs(), batches())
