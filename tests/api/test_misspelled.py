"""Hooks that are misspelled or gone are told; names that are meant are not."""

import pytest
import torch
from torch import nn

import roomier
from roomier.api.misspelled import FORMER, check_hook_names


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


def said_of(obj, base, capsys):
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
def test_a_hook_that_lightning_removed_is_refused_before_anything_is_set_up(tmp_path, removed, today):
    class Old(Net):
        def prepare_data(self):
            raise AssertionError("nothing is set up")

    setattr(Old, removed, do_nothing)
    trainer = roomier.Trainer(max_steps=1, accelerator="cpu", default_root_dir=tmp_path / "runs")
    with pytest.raises(roomier.RoomierError, match=rf"{removed}='Old'.*Write {today}\(self\)"):
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
def test_a_near_miss_is_said(capsys, name, meant):
    said = said_of(module(name), roomier.Module, capsys)
    assert said == f"roomier: Mine.{name} is not a hook and is never called; did you mean {meant}?\n"


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
def test_a_name_that_is_meant_is_not_said(capsys, name):
    assert said_of(module(name), roomier.Module, capsys) == ""


def test_a_helper_beside_the_hook_is_meant(capsys):
    assert said_of(module("training_step", "train_step"), roomier.Module, capsys) == ""


def test_a_misspelled_override_of_ones_own_base_class_is_said(capsys):
    assert "did you mean training_step?" in said_of(module("trainig_step", base=Net), roomier.Module, capsys)


@pytest.mark.parametrize("name", FORMER)
def test_a_former_hook_is_said(capsys, name):
    assert f"Mine.{name} is no longer a hook and is never called" in said_of(module(name), roomier.Module, capsys)


def test_callbacks_and_data_modules_too(make_trainer, capsys):
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
    said = capsys.readouterr().err
    assert (
        said.count("Watch.on_train_epoch_ends is not a hook and is never called; did you mean on_train_epoch_end?") == 1
    )
    assert said.count("Data.test_dataloaders is not a hook and is never called; did you mean test_dataloader?") == 1


def test_what_roomier_ships_is_not_looked_at(make_trainer, capsys):
    make_trainer(max_steps=1, enable_checkpointing=True, enable_progress_bar=True).fit(Net(), [torch.ones(1, 1)])
    assert "is not a hook" not in capsys.readouterr().err
