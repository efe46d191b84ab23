"""Values that cannot be logged, and callbacks that monitor missing metrics, are rejected."""

import pytest
import torch

import roomier
from roomier.callbacks import EarlyStopping, ModelCheckpoint
from roomier.core.errors import CheckpointError, RoomierError

pytestmark = pytest.mark.more


def logging(*args, **kwargs):
    """Return a training_step that logs values and returns a finite loss."""

    def training_step(self, batch, batch_idx):
        self.log(*args, **kwargs)
        return self.loss(batch)

    return training_step


def logs_twice(first, second):
    def training_step(self, batch, batch_idx):
        self.log(*first[:2], **first[2])
        self.log(*second[:2], **second[2])
        return self.loss(batch)

    return training_step


def log_after_fit(desk):
    net = desk.Net()
    desk.fit(net)
    net.log("late", 1.0)


class Keeps(roomier.Callback):
    """A callback with a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}


class LogsRow(roomier.Callback):
    def __init__(self, row):
        self.row = row

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.log_metrics(self.row)


class FitsWithin(roomier.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.validate(pl_module, [torch.zeros(2, 4)])


LOGS = {
    "a vector": (
        lambda d: d.fit(d.net(training_step=logging("gradients", torch.ones(3)))),
        "log",
        "('gradients', (3,))",
        "Reduce it first",
    ),
    "a string": (
        lambda d: d.fit(d.net(training_step=logging("note", "good"))),
        "log",
        "('note', 'str')",
        "Log a float or a 0-dim tensor",
    ),
    "a dict": (
        lambda d: d.fit(d.net(training_step=logging("losses", {"a": 1.0}))),
        "log",
        "('losses', 'dict')",
        "log_dict",
    ),
    "a name that is no string": (
        lambda d: d.fit(d.net(training_step=logging(torch.ones(()), "loss"))),
        "log",
        "tensor(1.)",
        "Call self.log(name, value)",
    ),
    "a complex number": (
        lambda d: d.fit(d.net(training_step=logging("phase", torch.tensor(1j)))),
        "log",
        "('phase', torch.complex64)",
        "value.real and value.imag",
    ),
    "a name that clears the terminal": (
        lambda d: d.fit(d.net(training_step=logging("\x1b[2Jloss", 1.0))),
        "log",
        r"'\x1b[2Jloss'",
        "Use printable characters",
    ),
    "a name of two lines": (
        lambda d: d.fit(d.net(training_step=logging("loss\n1,2,3", 1.0))),
        "log",
        r"'loss\n1,2,3'",
        "Use printable characters",
    ),
    "a name that is not a string": (
        lambda d: d.fit(d.net(training_step=logging("loss\udc80", 1.0))),
        "log",
        r"'loss\udc80'",
        "Use printable characters",
    ),
    "a row of a callback with a name of two lines": (
        lambda d: d.fit(callbacks=LogsRow({"a\nb": 1.0})),
        "log_metrics",
        r"'a\nb'",
        "Use printable characters",
    ),
    "an unknown reduction": (
        lambda d: d.fit(d.net(training_step=logging("loss", 1.0, reduce_fx="average"))),
        "log: reduce_fx",
        "'average'",
        "Use one of: max, mean, min, sum",
    ),
    "a negative batch_size": (
        lambda d: d.fit(d.net(training_step=logging("loss", 1.0, on_epoch=True, batch_size=-4))),
        "log: batch_size",
        "-4",
        "Pass the number of samples",
    ),
    "one name with two meanings": (
        lambda d: d.fit(
            d.net(training_step=logs_twice(("acc", 1.0, {"reduce_fx": "max"}), ("acc", 1.0, {"reduce_fx": "min"})))
        ),
        "log",
        "'acc'",
        "Use the same arguments each time, or another name",
    ),
    "two metrics in one column": (
        lambda d: d.fit(
            d.net(training_step=logs_twice(("acc", 1.0, {"on_step": True, "on_epoch": True}), ("acc_epoch", 1.0, {})))
        ),
        "log",
        "'acc_epoch'",
        "Use a different name",
    ),
    "after the fit": (log_after_fit, "log", "'late'", "Log in a step or in a hook of the loop"),
    "in configure_optimizers": (
        lambda d: d.fit(d.net(configure_optimizers=lambda self: self.log("early", 1.0))),
        "log",
        "'early'",
        "Log in a step or in a hook of the loop",
    ),
    "text to the loggers": (
        lambda d: d.fit(callbacks=LogsRow({"note": "good"})),
        "log_metrics",
        "('note', 'good')",
        "Pass numbers",
    ),
}

CALLBACKS = {
    "EarlyStopping with a metric that is not logged": (
        lambda d: d.fit(callbacks=EarlyStopping("train_los")),
        RoomierError,
        "EarlyStopping(monitor)",
        "'train_los'",
        "Did you mean 'train_loss'? Call self.log('train_los', value)",
    ),
    "ModelCheckpoint with a metric that is not logged": (
        lambda d: d.fit(callbacks=ModelCheckpoint(monitor="val_loss")),
        RoomierError,
        "ModelCheckpoint(monitor)",
        "'val_loss'",
        "Pass val_dataloaders to fit if validation_step logs it. Call self.log('val_loss', value)",
    ),
    "no metric is logged": (
        lambda d: d.fit(d.net(training_step=lambda self, batch, i: self.loss(batch)), callbacks=EarlyStopping("loss")),
        RoomierError,
        "EarlyStopping(monitor)",
        "'loss'",
        "Call self.log('loss', value)",
    ),
    "an unknown mode": (
        lambda d: EarlyStopping("loss", mode="lower"),
        RoomierError,
        "EarlyStopping(mode)",
        "'lower'",
        "Use 'min'",
    ),
    "a ranking without a monitor": (
        lambda d: ModelCheckpoint(save_top_k=3),
        RoomierError,
        "ModelCheckpoint(save_top_k)",
        "3",
        "Set monitor",
    ),
    "a file name that is a path": (
        lambda d: ModelCheckpoint(filename="best/{epoch}"),
        RoomierError,
        "filename",
        "'best/{epoch}'",
        "set the parent folder with dirpath",
    ),
    "a folder that is a number": (
        lambda d: ModelCheckpoint(dirpath=5),
        RoomierError,
        "ModelCheckpoint(dirpath)",
        "5",
        "Pass a string or a Path",
    ),
    "a folder with a NUL byte": (
        lambda d: ModelCheckpoint(dirpath="a\0b"),
        RoomierError,
        "ModelCheckpoint(dirpath)",
        r"'a\x00b'",
        "Remove the NUL byte",
    ),
    "two with the same state_key": (
        lambda d: d.fit(callbacks=[Keeps(1), Keeps(2)]),
        RoomierError,
        "callbacks",
        "'Keeps'",
        "override state_key",
    ),
    "one given twice": (
        lambda d: d.fit(callbacks=[quiet := LogsRow({}), quiet]),
        RoomierError,
        "callbacks",
        "LogsRow",
        "Remove one of the two entries",
    ),
    "a state that cannot be stored": (
        lambda d: d.fit(callbacks=Keeps(object())),
        CheckpointError,
        "state['callbacks']['Keeps']['value']",
        "<class 'object'>",
        "Convert it",
    ),
    "validate within a fit": (
        lambda d: d.fit(d.net(validation_step=lambda self, batch: None), callbacks=FitsWithin()),
        RoomierError,
        "validate",
        "'Net'",
        "set val_check_interval",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("act", "field", "received", "action"), [pytest.param(*row, id=name) for name, row in LOGS.items()]
)
def test_values_that_cannot_be_logged_are_rejected(act, field, received, action, refuses):
    refuses(act, RoomierError, field, received, action)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("act", "kind", "field", "received", "action"), [pytest.param(*row, id=name) for name, row in CALLBACKS.items()]
)
def test_an_invalid_callback_is_rejected(act, kind, field, received, action, refuses):
    refuses(act, kind, field, received, action)


def test_the_error_names_the_line_that_logs_an_invalid_metric(desk):
    with pytest.raises(RoomierError) as caught:
        desk.fit(desk.net(training_step=logging("note", "good")))
    assert any(entry.name == "training_step" for entry in caught.traceback)
