"""Misspelled and removed hooks are reported, but other names are not."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import roomier
from roomier.api.overrides import FORMER, check_hook_names


class Net(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def do_nothing(self, *args):
    return None


def module(*names, base=roomier.Module):
    return type("Mine", (base,), dict.fromkeys(names, do_nothing))()


def notices_of(obj, base, capsys):
    check_hook_names(obj, base)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("removed", "today"),
    [
        ("training_epoch_end", "on_train_epoch_end"),
        ("validation_epoch_end", "on_validation_epoch_end"),
        ("test_epoch_end", "on_test_epoch_end"),
    ],
)
def test_removed_hook_of_lightning_is_rejected_before_setup(tmp_path, removed, today):
    class Old(Net):
        def prepare_data(self):
            raise AssertionError("nothing is set up")

    setattr(Old, removed, do_nothing)
    trainer = roomier.Trainer(max_steps=1, accelerator="cpu", default_root_dir=tmp_path / "runs")
    with pytest.raises(roomier.RoomierError, match=rf"{removed}='Old'.*Use {today}\(self\)"):
        trainer.fit(Old(), [torch.ones(1, 1)])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("trainig_step", "training_step"),
        ("train_step", "training_step"),
        ("validation_steps", "validation_step"),
        ("validate_step", "validation_step"),
        ("test_steps", "test_step"),
        ("on_train_epoch_ends", "on_train_epoch_end"),
        ("on_training_epoch_end", "on_train_epoch_end"),
        ("configure_optimizer", "configure_optimizers"),
        ("train_dataloaders", "train_dataloader"),
        ("set_up", "setup"),
        ("num_loss_term", "num_loss_terms"),
    ],
)
def test_similar_name_is_reported(capsys, name, meant):
    message = notices_of(module(name), roomier.Module, capsys)
    assert message == f"roomier: Mine.{name} is not a hook and is never called; did you mean {meant}?\n"


@pytest.mark.parametrize(
    "name",
    [
        "on_train_epoch_end_extra",
        "training_step_end_loss",
        "prepare_dataset",
        "prepare_datasets",
        "global_steps",
        "my_training_step",
        "_training_step",
        "validate_step_shapes",
        "predict",
        "test",
        "loss",
        "shared_step",
        "eval_step",
        "step",
        "optimizer",
        "forward",
        "state_dict",
        "log_images",
        "configure_loss",
        "freezes",
    ],
)
def test_other_names_are_not_reported(capsys, name):
    assert notices_of(module(name), roomier.Module, capsys) == ""


def test_method_next_to_the_hook_is_not_reported(capsys):
    assert notices_of(module("training_step", "train_step"), roomier.Module, capsys) == ""


def test_misspelled_override_of_a_custom_base_class_is_reported(capsys):
    assert "did you mean training_step?" in notices_of(module("trainig_step", base=Net), roomier.Module, capsys)


@pytest.mark.parametrize("name", FORMER)
def test_former_hook_is_reported(capsys, name):
    assert f"Mine.{name} is no longer a hook and is never called" in notices_of(module(name), roomier.Module, capsys)


def test_callbacks_and_data_modules_are_checked(make_trainer, capsys):
    class Watch(roomier.Callback):
        def on_train_epoch_ends(self, trainer, pl_module): ...

    class Data(roomier.DataModule):
        def train_dataloader(self):
            return [torch.ones(1, 1)]

        def test_dataloaders(self): ...

    class Both(Net):
        def configure_callbacks(self):
            return [Watch()]

    make_trainer(max_steps=1).fit(Both(), datamodule=Data())
    message = capsys.readouterr().err
    problem = "is not a hook and is never called; did you mean"
    assert message.count(f"Watch.on_train_epoch_ends {problem} on_train_epoch_end?") == 1
    assert message.count(f"Data.test_dataloaders {problem} test_dataloader?") == 1


def test_own_classes_of_roomier_are_not_reported(make_trainer, capsys):
    make_trainer(max_steps=1, enable_checkpointing=True, enable_progress_bar=True).fit(Net(), [torch.ones(1, 1)])
    assert "is not a hook" not in capsys.readouterr().err


def test_a_hook_of_a_callback_without_self_is_rejected_before_training(tmp_path):
    class Mine(roomier.Callback):
        def on_train_start(trainer, pl_module):  # noqa: N805
            raise AssertionError("the hook is not called")

    trainer = roomier.Trainer(max_steps=1, accelerator="cpu", default_root_dir=tmp_path / "runs", callbacks=[Mine()])
    message = r"on_train_start=.*Define it as `def on_train_start\(self, trainer, pl_module\)`"
    with pytest.raises(roomier.RoomierError, match=message):
        trainer.fit(Net(), [torch.ones(1, 1)])
    assert trainer.global_step == 0


@pytest.mark.parametrize("base", [roomier.Callback, pl.Callback])
def test_hooks_with_the_arguments_of_a_hook_are_accepted(base):
    class Mine(base):
        def on_train_start(self, *arguments, **keywords):
            return None

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, more=None):
            return None

        @staticmethod
        def on_train_end(trainer, pl_module):
            return None

    check_hook_names(Mine(), roomier.Callback)


def test_a_published_misspelling_of_an_export_names_the_method():
    with pytest.raises(roomier.RoomierError, match="Call to_onnx"):
        Net().to_omni("model.onnx")
