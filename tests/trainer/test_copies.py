"""Copies of a Trainer, including a Trainer that is sent to another process with its DataModule."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import roomier


class Line(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(roomier.DataModule):
    def train_dataloader(self) -> Any:
        return [torch.ones(2, 3)] * 3


class SendDataModule(roomier.Callback):
    """Callback that sends the DataModule to another process in the second epoch, like spawned worker processes."""

    received: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            self.received = pickle.loads(pickle.dumps(trainer.datamodule))


def anew(trainer: Any) -> Any:
    return pickle.loads(pickle.dumps(trainer))


@pytest.mark.parametrize("made", [copy.deepcopy, anew])
def test_a_copy_has_the_settings_and_no_run(make_trainer, made):
    trainer = make_trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[roomier.callbacks.EarlyStopping("loss")])
    assert made(trainer).max_epochs == 2
    trainer.callbacks = []
    trainer.fit(Line(), datamodule=Data())
    copied = made(trainer)
    assert (copied.global_step, copied.current_epoch) == (4, 2)
    assert copied.accumulate_grad_batches == 2
    assert copied.model is None
    copied.fit(Line(), datamodule=Data())
    assert copied.global_step == 4
    assert copied.run is not trainer.run


def test_a_datamodule_is_sent_to_a_worker_process_during_a_run(make_trainer):
    """The collate_fn is a method of the DataModule, so the DataModule and its Trainer are sent with the loader."""
    callback = SendDataModule()
    trainer = make_trainer(max_epochs=2, logger=True, enable_progress_bar=True, callbacks=[callback])
    trainer.fit(Line(), datamodule=Data())
    there = callback.received.trainer
    assert (there.global_step, there.current_epoch, there.training) == (4, 1, True)
    assert there.is_global_zero
    assert there.callbacks == there.loggers == []
