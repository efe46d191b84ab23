"""LearningRateMonitor: names, rates, and the log rows that contain them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roomier.api.module import Module
from roomier.callbacks import LearningRateMonitor
from roomier.core.errors import RoomierError
from roomier.trainer import Trainer

Make = Callable[..., Trainer]


class Net(Module):
    """Module whose ``configure_optimizers`` calls the given function."""

    def __init__(self, configure: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 1), nn.Linear(2, 1)
        self._configure = configure

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.one(batch) + self.two(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return self._configure(self)


def rates(trainer: Trainer, prefix: str = "lr") -> dict[int, dict[str, float]]:
    """Return the logged rates by step."""
    found: dict[int, dict[str, float]] = {}
    for line in (Path(trainer.log_dir) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        values = {name: value for name, value in row.items() if name.startswith(prefix)}
        if values:
            assert row["step"] not in found, "one row per step"
            found[row["step"]] = values
    return found


def halving(net: nn.Module, interval: str, **config: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval, **config}}


def test_row_contains_the_rate_used_in_its_step(make_trainer: Make, batches: Any) -> None:
    trainer = make_trainer(LearningRateMonitor(), max_steps=6, log_every_n_steps=2)
    trainer.fit(Net(lambda net: halving(net, "step")), batches)
    # step 1 at 1, step 2 at 1/2, ..., step n at 2^(1-n)
    assert rates(trainer) == {2: {"lr-SGD": 0.5}, 4: {"lr-SGD": 0.125}, 6: {"lr-SGD": 0.03125}}
    assert trainer.callback_metrics["lr-SGD"].item() == 0.03125


def test_accumulation_logs_one_row_per_optimizer_step(make_trainer: Make, batches: Any) -> None:
    monitor = LearningRateMonitor()
    trainer = make_trainer(monitor, max_epochs=1, log_every_n_steps=1, accumulate_grad_batches=4)
    trainer.fit(Net(lambda net: halving(net, "step")), batches)
    assert rates(trainer) == {1: {"lr-SGD": 1.0}, 2: {"lr-SGD": 0.5}, 3: {"lr-SGD": 0.25}}
    assert monitor.lrs == {"lr-SGD": [1.0, 0.5, 0.25]}


def test_epoch_scheduler_is_logged_in_each_epoch(make_trainer: Make, batches: Any) -> None:
    trainer = make_trainer(LearningRateMonitor(), max_epochs=3, log_every_n_steps=1)
    trainer.fit(Net(lambda net: halving(net, "epoch")), batches)
    assert rates(trainer) == {10: {"lr-SGD": 1.0}, 20: {"lr-SGD": 0.5}, 30: {"lr-SGD": 0.25}}


def test_logging_interval_argument(make_trainer: Make, batches: Any) -> None:
    trainer = make_trainer(LearningRateMonitor("epoch"), max_epochs=2, log_every_n_steps=1)
    trainer.fit(Net(lambda net: torch.optim.SGD(net.parameters(), lr=0.5)), batches)
    assert rates(trainer) == {10: {"lr-SGD": 0.5}, 20: {"lr-SGD": 0.5}}
    trainer = make_trainer(LearningRateMonitor("step"), max_epochs=2, log_every_n_steps=5)
    trainer.fit(Net(lambda net: halving(net, "epoch")), batches)
    assert rates(trainer) == {5: {"lr-SGD": 1.0}, 10: {"lr-SGD": 1.0}, 15: {"lr-SGD": 0.5}, 20: {"lr-SGD": 0.5}}


def test_groups_momentum_weight_decay_and_custom_names(make_trainer: Make, batches: Any) -> None:
    def configure(net: Any) -> Any:
        groups = [{"params": net.one.parameters(), "lr": 0.1}, {"params": net.two.parameters(), "name": "head"}]
        return torch.optim.AdamW(groups, lr=0.2, betas=(0.75, 0.99), weight_decay=0.5)

    trainer = make_trainer(LearningRateMonitor("step", True, True), max_steps=1, log_every_n_steps=1)
    trainer.fit(Net(configure), batches)
    assert rates(trainer)[1] == {
        "lr-AdamW/pg1": 0.1,
        "lr-AdamW/pg1-momentum": 0.75,
        "lr-AdamW/pg1-weight_decay": 0.5,
        "lr-AdamW/head": 0.2,
        "lr-AdamW/head-momentum": 0.75,
        "lr-AdamW/head-weight_decay": 0.5,
    }
    trainer = make_trainer(LearningRateMonitor(log_momentum=True), max_steps=1, log_every_n_steps=1)
    trainer.fit(Net(lambda net: halving(net, "step", name="warmup")), batches)
    assert rates(trainer, "warmup") == {1: {"warmup": 1.0, "warmup-momentum": 0.0}}


def test_optimizers_of_the_same_class_are_numbered(make_trainer: Make, batches: Any) -> None:
    class ByHand(Net):
        def __init__(self, configure: Callable[[nn.Module], Any]) -> None:
            super().__init__(configure)
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    def configure(net: Any) -> Any:
        return [torch.optim.SGD(net.one.parameters(), lr=0.1), torch.optim.SGD(net.two.parameters(), lr=0.2)]

    trainer = make_trainer(LearningRateMonitor(), max_epochs=1, limit_train_batches=4, log_every_n_steps=2)
    trainer.fit(ByHand(configure), batches)
    assert trainer.global_step == 8, "two steps per batch"
    # log_every_n_steps counts batches, as in other rows of a module with manual optimization
    assert rates(trainer) == {step: {"lr-SGD": 0.1, "lr-SGD-1": 0.2} for step in (2, 4)}


def test_invalid_settings_are_rejected(make_trainer: Make, batches: Any) -> None:
    with pytest.raises(RoomierError, match="logging_interval='batch'"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]
    with pytest.raises(RoomierError, match="requires a logger"):
        make_trainer(LearningRateMonitor(), max_steps=1, logger=False).fit(
            Net(lambda net: torch.optim.SGD(net.parameters(), lr=0.5)), batches
        )

    def doubled(net: Any) -> Any:
        return torch.optim.SGD(
            [{"params": net.one.parameters(), "name": "a"}, {"params": net.two.parameters(), "name": "a"}], lr=0.1
        )

    with pytest.raises(RoomierError, match="is the name of two parameter groups of lr-SGD"):
        make_trainer(LearningRateMonitor(), max_steps=1, log_every_n_steps=1).fit(Net(doubled), batches)
