"""Module without a Trainer, copies of modules, and error messages."""

import copy
import pickle

import pytest
import torch
from torch import nn

import roomier
from roomier.api.adapt import as_module


class Net(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def attached(tmp_path):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    module = Net()
    roomier.Trainer(max_steps=2, default_root_dir=tmp_path, **quiet).fit(module, [torch.ones(1, 2)] * 2)
    return module


def test_without_a_trainer():
    module = Net()
    assert not module.is_attached
    assert (module.current_epoch, module.global_step, module.logger, module.loggers) == (0, 0, None, [])
    assert (module.global_rank, module.local_rank) == (0, 0)
    with pytest.raises(roomier.RoomierError, match="Net is not attached to a Trainer"):
        _ = module.trainer


def test_a_trainer_can_be_set_as_in_lightning() -> None:
    net, trainer = Net(), roomier.Trainer(logger=False, enable_checkpointing=False)
    net.trainer = trainer
    assert net.trainer is trainer
    assert net.current_epoch == 0
    net.trainer = None
    assert not net.is_attached


def test_attached(attached):
    assert attached.trainer.model is attached
    assert attached.global_step == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copy_has_no_trainer(attached, duplicate):
    other = duplicate(attached)
    assert attached.is_attached
    assert not other.is_attached
    assert torch.equal(other.net.weight, attached.net.weight)
    assert other.net.weight is not attached.net.weight
    assert other.training_step(torch.ones(1, 2), 0).shape == ()


def test_copy_within_a_fit(tmp_path):
    """Weight averaging creates such a copy."""
    copies = []

    class Copies(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            copies.append(copy.deepcopy(self))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    module = Copies()
    roomier.Trainer(max_steps=2, default_root_dir=tmp_path, **quiet).fit(module, [torch.ones(1, 2)] * 2)
    assert [each.is_attached for each in copies] == [False, False]
    assert not torch.equal(copies[0].net.weight, copies[1].net.weight)


def test_state_does_not_contain_the_trainer(attached):
    assert set(attached.state_dict()) == {"net.weight", "net.bias"}
    assert [name for name, _ in attached.named_modules()] == ["", "net"]


def test_device_and_dtype():
    module = Net().double()
    assert (module.device, module.dtype) == (torch.device("cpu"), torch.float64)
    empty = roomier.Module()
    assert (empty.device, empty.dtype) == (torch.device("cpu"), torch.float32)


def test_freeze_and_unfreeze():
    module = Net()
    module.freeze()
    assert not any(p.requires_grad for p in module.parameters())
    assert not module.training
    module.unfreeze()
    assert all(p.requires_grad for p in module.parameters())
    assert module.training


def test_missing_step_is_reported(tmp_path):
    with pytest.raises(roomier.RoomierError, match="does not define training_step"):
        roomier.Module().training_step(1, 0)


def test_compiled_module_is_rejected():
    with pytest.raises(
        roomier.RoomierError, match=r"model='Net': is wrapped by torch\.compile.* Pass the module itself"
    ):
        as_module(torch.compile(Net(), backend="eager"))


def test_print(capsys):
    Net().print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"


def test_predict_step_calls_forward():
    class Doubles(roomier.Module):
        def forward(self, x):
            return 2 * x

    assert Doubles().predict_step(3, 0) == 6
