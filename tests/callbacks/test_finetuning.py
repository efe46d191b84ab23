"""Modules that are frozen first and trained later: learning rates, parameter groups, resumed runs, and several
ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader

import roomier
from roomier.callbacks import BackboneFinetuning, BaseFinetuning, Callback
from roomier.core.errors import RoomierError
from roomier.trainer import Trainer
from tests.covering import few

Make = Callable[..., Trainer]


class Net(roomier.Module):
    def __init__(self, schedule: str = "none", norm: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Identity(), nn.ReLU())
        self.head = nn.Linear(6, 1)
        self.schedule = schedule
        self.rates: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.head(self.backbone(batch)) - batch.sum(dim=1, keepdim=True)).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.08)
        if self.schedule == "step":
            return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]
        if self.schedule == "lambda":
            return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.5**epoch)]
        return optimizer


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.global_step == self.step


def data() -> Tensor:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


def fit(
    root: Path, *callbacks: Callback, strategy: str = "single", devices: int = 1, path: Path | None = None, **model: Any
) -> tuple[Net, Trainer]:
    torch.manual_seed(1)
    net = Net(**model)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=4,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[BackboneFinetuning(1, lambda epoch: 3.0), *callbacks],
    )
    trainer.fit(net, DataLoader(data(), batch_size=6 // devices), ckpt_path=path)
    return net, trainer


def test_backbone_rate_starts_at_a_fraction_and_grows(tmp_path: Path) -> None:
    net, _ = fit(tmp_path)
    for rates, expected in zip(net.rates, [[0.08], [0.08, 0.008], [0.08, 0.024], [0.08, 0.072]], strict=True):
        assert rates == pytest.approx(expected)


def test_should_align_limits_the_backbone_rate(make_trainer: Make) -> None:
    for should_align, last in ((True, 0.08), (False, 0.8)):
        net = Net()
        finetuning = BackboneFinetuning(0, lambda epoch: 10.0, should_align=should_align)
        make_trainer(finetuning, max_epochs=3, logger=False, enable_checkpointing=False).fit(net, [data()])
        assert [rates[-1] for rates in net.rates] == pytest.approx([0.008, 0.08, last])


def test_frozen_backbone_keeps_its_weights_until_its_epoch(make_trainer: Make) -> None:
    net = Net()
    before = net.backbone[0].weight.clone()
    seen = []
    spy = type("Spy", (Callback,), {"on_train_epoch_end": lambda *_: seen.append(net.backbone[0].weight.clone())})
    finetuning = BackboneFinetuning(2)
    make_trainer(finetuning, spy(), max_epochs=3, logger=False, enable_checkpointing=False).fit(net, [data()])
    assert torch.equal(seen[0], before)
    assert torch.equal(seen[1], before)
    assert not torch.equal(seen[2], before)


def test_train_bn_determines_whether_statistics_are_updated(make_trainer: Make) -> None:
    class All(BaseFinetuning):
        def __init__(self, train_bn: bool) -> None:
            super().__init__()
            self.train_bn = train_bn

        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.backbone, train_bn=self.train_bn)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None: ...

    for train_bn in (True, False):
        net = Net(norm=True)
        make_trainer(All(train_bn), max_epochs=1, logger=False, enable_checkpointing=False).fit(net, [data()])
        norm = net.backbone[1]
        assert bool(norm.running_mean.any()) is train_bn
        assert norm.weight.requires_grad is train_bn
        assert not net.backbone[0].weight.requires_grad


@pytest.mark.parametrize("step", few([8, 2, 14]))
@pytest.mark.parametrize("schedule", ["step", "lambda"])
def test_resumed_run_is_bitwise_equal(tmp_path: Path, step: int, schedule: str) -> None:
    straight, first = fit(tmp_path, schedule=schedule, norm=True)
    _, trainer = fit(tmp_path, StopsAt(step), schedule=schedule, norm=True)
    trainer.save_checkpoint(tmp_path / "half")
    resumed, second = fit(tmp_path, path=tmp_path / "half", schedule=schedule, norm=True)
    rates = [[group["lr"] for group in each.optimizers[0].param_groups] for each in (first, second)]
    assert rates[0] == rates[1]
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_parameters_in_the_optimizer_are_not_added_again(make_trainer: Make, capsys: Any) -> None:
    class TakesAll(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    net = TakesAll()
    finetuning = BackboneFinetuning(0)
    make_trainer(finetuning, max_epochs=1, logger=False, enable_checkpointing=False).fit(net, [data()])
    assert "SGD already contains" in capsys.readouterr().err
    assert len(net.rates[0]) == 1


def test_module_without_backbone_is_rejected(make_trainer: Make) -> None:
    class Bare(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = self.backbone
            del self.backbone

    with pytest.raises(RoomierError, match="must have an attribute 'backbone'"):
        make_trainer(BackboneFinetuning(0), max_epochs=1).fit(Bare(), [data()])


def save_straight_and_resumed(root: Path, devices: int, strategy: str) -> None:
    fit(root, strategy=strategy, devices=devices)[1].save_checkpoint(root / "whole")
    fit(root, StopsAt(8), strategy=strategy, devices=devices)[1].save_checkpoint(root / "half")
    fit(root, strategy=strategy, devices=devices, path=root / "half")[1].save_checkpoint(root / "resumed")


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["ddp", "zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_unfrozen_parameters_are_trained_on_all_ranks(on_ranks: Any, tmp_path: Path, strategy: str) -> None:
    fit(tmp_path)[1].save_checkpoint(tmp_path / "one")
    on_ranks(2, save_straight_and_resumed, tmp_path, 2, strategy)
    one, straight, resumed = (
        roomier.checkpoint.load(tmp_path / name, only=("module",)) for name in ("one", "whole", "resumed")
    )
    torch.testing.assert_close(straight, one, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["freeze_before_training", "finetune_function"])
def test_missing_method_is_named(make_trainer: Make, name: str) -> None:
    other = {"freeze_before_training", "finetune_function"} - {name}
    partial = type("Partial", (BaseFinetuning,), {each: lambda self, *arguments: None for each in other})()
    with pytest.raises(RoomierError, match=f"{name}='Partial'.*Define {name}"):
        make_trainer(partial, max_steps=1, logger=False, enable_checkpointing=False).fit(Net(), [data()])
