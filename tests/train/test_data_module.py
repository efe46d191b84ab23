"""Features of DataModules other than loaders: hyperparameters, transfer hooks, datasets."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import roomier


class Net(roomier.Module):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(1, width)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(float(batch[0].max()))
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(float(batch[0].max()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Data(roomier.DataModule):
    def __init__(self, size=3, width=1):
        self.save_hyperparameters()

    def train_dataloader(self):
        return [(torch.ones(self.hparams.size, 1),)]

    val_dataloader = train_dataloader


def test_arguments_are_stored():
    assert dict(Data(4).hparams) == {"size": 4, "width": 1}


def test_hyperparameters_are_logged_together_with_the_module(make_trainer, tmp_path):
    make_trainer(max_steps=1, logger=True).fit(Net(), datamodule=Data(4))
    stored = json.loads((tmp_path / "version_0" / "hparams.json").read_text())
    assert {"size": 4, "width": 1}.items() <= stored.items()


def test_logger_false_excludes_hyperparameters(make_trainer, tmp_path):
    class Quiet(Data):
        def __init__(self, secret):
            self.save_hyperparameters(logger=False)

        def train_dataloader(self):
            return [(torch.ones(1, 1),)]

    make_trainer(max_steps=1, logger=True, limit_val_batches=0).fit(Net(), datamodule=Quiet("x"))
    assert "secret" not in (tmp_path / "version_0" / "hparams.json").read_text()


def test_different_values_of_one_hyperparameter_are_rejected(make_trainer):
    with pytest.raises(roomier.RoomierError, match=r"hparams=\{'width': \(1, 2\)\}.*different values"):
        make_trainer(max_steps=1).fit(Net(1), datamodule=Data(width=2))


class Moves(Data):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert device == torch.device("cpu")
        return [10 * each for each in super().transfer_batch_to_device(batch, device, dataloader_idx)]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 5]


def test_transfer_hooks_are_used(make_trainer):
    net = Net()
    make_trainer(max_steps=1).fit(net, datamodule=Moves())
    assert net.seen == [25.0, 25.0, 25.0]  # sanity check, training, validation: (1 + 1) * 10 + 5


def test_hook_of_the_data_module_takes_precedence(make_trainer):
    class Also(Net):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [-batch[0]]

    net = Also()
    make_trainer(max_steps=1, num_sanity_val_steps=0).fit(net, datamodule=Moves())
    assert net.seen == [25.0, 25.0]


def numbers(*values):
    return TensorDataset(torch.tensor(values, dtype=torch.float32)[:, None])


def test_from_datasets(make_trainer):
    data = roomier.DataModule.from_datasets(
        numbers(*range(8)), [numbers(20, 21), numbers(30)], predict_dataset=numbers(1, 2, 3), batch_size=2
    )
    torch.manual_seed(0)
    train = [batch[0].flatten().tolist() for batch in data.train_dataloader()]
    assert [len(batch) for batch in train] == [2, 2, 2, 2]
    values = [value for batch in train for value in batch]
    assert sorted(values) == list(range(8)) != values  # each once, shuffled
    assert [[b[0].flatten().tolist() for b in loader] for loader in data.val_dataloader()] == [[[20, 21]], [[30]]]
    assert data.test_dataloader() is None
    assert [len(batch[0]) for batch in data.predict_dataloader()] == [2, 1]

    net = Net()
    make_trainer(max_epochs=1, limit_val_batches=0).fit(net, datamodule=data)
    assert len(net.seen) == 4


def test_from_datasets_with_a_subclass_and_an_iterable():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([1, 2])

    data = Data.from_datasets(Stream(), size=7)
    assert data.hparams.size == 7
    assert [batch.tolist() for batch in data.train_dataloader()] == [[1], [2]]
