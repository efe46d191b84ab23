"""Unreadable data and missing batches are rejected. Errors of the user's code are raised unchanged."""

import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import roomier
from roomier.core.errors import DataError, RoomierError

pytestmark = pytest.mark.more

SAMPLES = TensorDataset(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))


class Stream(IterableDataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return iter([SAMPLES[i % 6] for i in range(self.num_samples)])


class Broken(Dataset):
    """A dataset whose third sample raises an error."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            raise FileNotFoundError("sample 3 is gone")
        return SAMPLES[index]


class Dies(Broken):
    """A dataset that kills the worker process, as the out-of-memory killer does."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


class NoLength(Dataset):
    def __getitem__(self, index):
        return SAMPLES[index]


class Data(roomier.DataModule):
    pass


def validated(desk):
    return desk.net(validation_step=lambda self, batch, batch_idx: self.log("val_loss", self.loss(batch)))


LOADERS = {
    "no data": (lambda d: roomier.Trainer().fit(d.Net()), "train_dataloaders", "None", "Pass it to fit, or define"),
    "a datamodule without train_dataloader": (
        lambda d: d.fit(datamodule=Data()),
        "train_dataloaders",
        "None",
        "define train_dataloader",
    ),
    "an empty list": (lambda d: d.fit(train=[]), "train_dataloaders", "[]", "at least one batch"),
    "a DataLoader that drops all batches": (
        lambda d: d.fit(train=DataLoader(SAMPLES, batch_size=8, drop_last=True)),
        "train_dataloaders",
        "DataLoader",
        "must have at least batch_size samples",
    ),
    "an iterable without a batch": (
        lambda d: d.fit(train=DataLoader(Stream(0))),
        "train_dataloaders",
        "DataLoader",
        "at least one batch",
    ),
    "an empty validation set": (
        lambda d: d.fit(validated(d), val=[]),
        "val_dataloaders",
        "[]",
        "at least one batch",
    ),
    "a number": (lambda d: d.fit(train=3), "train_dataloaders", "3", "Pass a DataLoader, a list of batches"),
    "a tensor": (lambda d: d.fit(train=torch.ones(4, 4)), "train_dataloaders", "tensor(", "Pass a DataLoader"),
    "a data set": (lambda d: d.fit(train=SAMPLES), "train_dataloaders", "TensorDataset", "DataLoader(dataset, batch"),
    "a data set without a length": (
        lambda d: d.fit(train=DataLoader(NoLength(), sampler=range(4), batch_size=2).dataset),
        "train_dataloaders",
        "NoLength",
        "DataLoader(dataset, batch",
    ),
    "a batch in place of a list of batches": (
        lambda d: d.fit(train={"x": torch.ones(4, 4)}),
        "train_dataloaders",
        "{'x'",
        "Pass a loader, a list of batches",
    ),
    "one of several training loaders": (
        lambda d: d.fit(train=[DataLoader(SAMPLES), 3]),
        "train_dataloaders[1]",
        "3",
        "loader",
    ),
    "a generator for two epochs": (
        lambda d: d.fit(train=iter(d.batches)),
        "train_dataloaders",
        "iterator",
        "or train for one epoch",
    ),
    "validate without data": (
        lambda d: d.trainer().validate(validated(d)),
        "val_dataloaders",
        "None",
        "Pass val_dataloaders",
    ),
    "a worker that dies": (
        lambda d: d.fit(train=DataLoader(Dies(), num_workers=1)),
        "train_dataloaders",
        "DataLoader",
        "num_workers=0",
    ),
}

LIMITS = {
    "validation after more batches than an epoch has": (
        lambda d: d.fit(validated(d), val=d.batches, val_check_interval=100),
        "val_check_interval",
        "100",
        "check_val_every_n_epoch=None",
    ),
    "validation after a share of an unknown number": (
        lambda d: d.fit(validated(d), train=DataLoader(Stream(6)), val=d.batches, val_check_interval=0.5),
        "val_check_interval",
        "0.5",
        "Set it to a number of batches",
    ),
    "a share of a loader without a length": (
        lambda d: d.fit(train=DataLoader(Stream(6)), limit_train_batches=0.5),
        "limit_train_batches",
        "0.5",
        "Set it to a number of batches",
    ),
    "a share of less than one batch": (
        lambda d: d.fit(validated(d), val=d.batches, limit_val_batches=0.1),
        "limit_val_batches",
        "0.1",
        "Use at least 0.25",
    ),
    "loaders and a datamodule": (
        lambda d: d.fit(datamodule=Data(), train=d.batches),
        "datamodule",
        "'Data'",
        "Pass either a DataModule or loaders",
    ),
    "validate without validation_step": (
        lambda d: d.trainer().validate(d.Net(), d.batches),
        "validation_step",
        "'Net'",
        "Define validation_step(self, batch, batch_idx)",
    ),
    "test without test_step": (
        lambda d: d.trainer().test(d.Net(), d.batches),
        "test_step",
        "'Net'",
        "Define test_step(self, batch, batch_idx)",
    ),
    "validate without a model": (
        lambda d: d.trainer().validate(dataloaders=d.batches),
        "model",
        "None",
        "Pass a model, or call fit first",
    ),
    "dataloader_idx with one loader": (
        lambda d: d.fit(d.net(validation_step=lambda self, batch, batch_idx, dataloader_idx: None), val=d.batches),
        "validation_step",
        "dataloader_idx",
        "Define it as validation_step(self, batch, batch_idx)",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("act", "field", "received", "action"), [pytest.param(*row, id=name) for name, row in LOADERS.items()]
)
def test_unreadable_data_is_rejected(act, field, received, action, refuses, desk, monkeypatch):
    monkeypatch.chdir(desk.root.parent)
    refuses(act, DataError, field, received, action)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("act", "field", "received", "action"), [pytest.param(*row, id=name) for name, row in LIMITS.items()]
)
def test_unreadable_parts_of_data_are_rejected(act, field, received, action, refuses):
    refuses(act, RoomierError, field, received, action)


# Errors in the user's code ------------------------------------------------------------------------------------


class Witness(roomier.Callback):
    """A callback that records how a run ended."""

    def __init__(self):
        self.exceptions, self.num_teardowns = [], 0

    def on_exception(self, trainer, pl_module, exception):
        self.exceptions.append(exception)

    def teardown(self, trainer, pl_module, stage):
        self.num_teardowns += 1


def of_three(self, batch, batch_idx):
    x, y, z = batch
    return x + y + z


def read_config(self, *_):
    raise KeyError("learning_rate")


USER_ERRORS = {
    "a batch that cannot be unpacked": (lambda d: {"model": d.net(training_step=of_three)}, ValueError, "of_three"),
    "a batch with other items": (
        lambda d: {"train": [{"x": 1}]},
        ValueError,
        "loss",
    ),
    "inputs of another width": (
        lambda d: {"train": [(torch.ones(2, 5), torch.zeros(2, dtype=torch.int64))]},
        RuntimeError,
        "loss",
    ),
    "a sample that cannot be read": (
        lambda d: {"train": DataLoader(Broken())},
        FileNotFoundError,
        "__getitem__",
    ),
    "an error in configure_optimizers": (
        lambda d: {"model": d.net(configure_optimizers=read_config)},
        KeyError,
        "read_config",
    ),
    "an error in setup": (lambda d: {"model": d.net(setup=read_config)}, KeyError, "read_config"),
    "an error in validation_step": (
        lambda d: {"model": d.net(validation_step=read_config), "val": d.batches},
        KeyError,
        "read_config",
    ),
    "an error in a hook": (lambda d: {"model": d.net(on_train_epoch_end=read_config)}, KeyError, "read_config"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("of", "kind", "frame"), [pytest.param(*row, id=name) for name, row in USER_ERRORS.items()])
def test_an_error_of_the_user_is_raised_unchanged(of, kind, frame, desk):
    witness = Witness()
    with pytest.raises(kind) as caught:
        desk.fit(**of(desk), callbacks=[witness])
    assert type(caught.value) is kind
    assert not isinstance(caught.value, RoomierError)
    assert frame in [entry.name for entry in caught.traceback]
    assert witness.exceptions == [caught.value]
    assert witness.num_teardowns == 1


def test_the_error_of_a_sample_read_in_a_worker_keeps_its_kind_and_its_line(desk):
    with pytest.raises(FileNotFoundError, match=r"(?s)sample 3 is gone"):
        desk.fit(train=DataLoader(Broken(), num_workers=1))


ENDS_WITH_AN_ERROR = """
import torch, roomier
from torch.utils.data import DataLoader, TensorDataset

class Net(roomier.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        raise KeyError("learning_rate")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

loader = DataLoader(TensorDataset(torch.randn(64, 4)), num_workers=1)
roomier.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False).fit(Net(), loader)
"""


@pytest.mark.timeout(90)
def test_a_script_that_ends_with_an_error_does_not_wait_for_its_workers(desk):
    done = subprocess.run(
        [sys.executable, "-c", ENDS_WITH_AN_ERROR], cwd=desk.root, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("KeyError: 'learning_rate'")


def test_an_error_of_a_plain_model_states_how_its_batch_was_passed(desk):
    with pytest.raises(TypeError) as caught:
        desk.fit(torch.nn.Linear(4, 2), optimizer="adamw")
    assert caught.value.__notes__ == ["roomier called Linear(*batch) with the 2 items of a tuple"]


@pytest.mark.parametrize(
    ("of", "shown"),
    [
        (lambda d: {"train": [["a", "b"], ["c", "d"]]}, "train_dataloaders=['a', 'b']"),
        (lambda d: {"train": DataLoader(["a", "b"], batch_size=2)}, "train_dataloaders=['a', 'b']"),
        (
            lambda d: {"train": [{"text": ["a"]}], "model": torch.nn.Linear(4, 2), "optimizer": "adamw"},
            "{'text': ['a']}",
        ),
        (lambda d: {"model": validated(d), "val": [("a", "b")]}, "val_dataloaders=('a', 'b')"),
    ],
)
def test_an_error_with_a_batch_of_text_states_the_reason(of, shown, desk):
    with pytest.raises(TypeError) as caught:
        desk.fit(**of(desk))
    note = caught.value.__notes__[-1]
    assert f"{shown}: the batch contains text and no tensor. Convert the text to tensors" in note


@pytest.mark.parametrize(("model", "val"), [("validated", None), ("Net", "batches")])
def test_impossible_validation_is_reported_and_training_continues(model, val, desk, capsys):
    net = validated(desk) if model == "validated" else desk.Net()
    desk.fit(net, val=desk.batches if val else None, max_epochs=1)
    told = capsys.readouterr().err
    assert (
        "does not define validation_step, so val_dataloaders are not used" if val else "no validation data was passed"
    ) in told


def test_zero_training_batches_end_the_run(desk):
    trainer = desk.fit(limit_train_batches=0, max_epochs=None, max_steps=3)
    assert trainer.global_step == 0


def test_an_endless_loader_ends_at_max_steps(desk):
    trainer = desk.fit(train=itertools.cycle(desk.batches), max_epochs=None, max_steps=3)
    assert trainer.global_step == 3
