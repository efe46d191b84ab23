"""Annotations that users write on callbacks and modules. ``make lint`` runs mypy on this file."""

import torch
from torch import Tensor, nn

import roomier


class Rates(roomier.Callback):
    """Callback that annotates the Trainer with its class."""

    def __init__(self) -> None:
        self.num_steps: list[float] = []

    def on_train_start(self, trainer: roomier.Trainer, pl_module: roomier.Module) -> None:
        self.num_steps.append(trainer.num_steps_in_all)
        trainer.should_stop = True


class Line(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.num_steps: float = self.trainer.estimated_stepping_batches
        self.trainer.should_stop = False
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_callback_and_a_module_read_the_trainer() -> None:
    rates, module = Rates(), Line()
    trainer = roomier.Trainer(max_epochs=3, callbacks=[rates], logger=False, enable_checkpointing=False)
    trainer.fit(module, [torch.ones(4, 2)] * 2)
    assert (module.num_steps, rates.num_steps) == (6, [6])
    assert trainer.global_step == 1  # should_stop ends training at the first save point
