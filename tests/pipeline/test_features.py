"""Hooks, callbacks and searches of a pipeline against one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

import roomier
from roomier.callbacks import BaseFinetuning, Callback, HistogramMonitor, RichModelSummary, SpikeGuard, Throughput
from roomier.tuner import lr_find
from tests.pipeline.test_loop import INTERLEAVED, Net, loader, trainer_of
from tests.ranks.pool import RankPool


class Busy(Net):
    """Module whose step and hooks use more than the batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        self.error(out, batch[1])
        self.log("train_error", self.error, on_step=True, on_epoch=True)
        factor = torch.ones((), device=self.device, dtype=self.dtype) / (1 + self.trainer.global_step)
        self.latest = nn.functional.mse_loss(out, batch[1]) * factor
        self.log("loss", self.latest)
        return self.latest

    def on_after_backward(self) -> None:
        for each in self.parameters():
            if each.grad is not None:
                each.grad *= 0.5

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.03)
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "loss", "interval": "step"}]


class Rate(Net):
    """Module whose learning rate a search can change."""

    lr = 0.01

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD([each for each in self.parameters() if each.requires_grad], lr=self.lr)


class Counting(Rate):
    """Module whose steps change its attributes and a metric before the last layer, and draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.noise = torchmetrics.MeanMetric()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        self.scale *= 0.99
        x = x * self.scale + 0.1 * torch.rand_like(x) / len(self.seen)
        self.noise(x.sum())
        self.log("noise", self.noise, on_step=self.training, on_epoch=True)
        self.hidden = self.enter(x)
        return super().forward(x) + 0.1 * len(self.seen)

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0] + 0.01 * torch.rand_like(batch[0]), batch[1]]

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.log("sum", batch[0].sum() * (1 + batch_idx), on_step=True)


class Twice(Net):
    """Module with two forward passes in a training step, which logs values that no later layer reads."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[1] = nn.LayerNorm(8, dtype=torch.float64)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        entered = self.enter(batch[0])
        other = self(batch[0]).square().mean()
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"entered": entered.norm(), "other": other}, on_epoch=True)
        return loss + other

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        entered = self.enter(batch[0]).norm()
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))
        self.log("val_entered", self.all_gather(entered).norm())


class Example(Net):
    example_input_array = torch.zeros(3, 4, dtype=torch.float64)


class NotFinite(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 5 else loss


class Unfreeze(BaseFinetuning):
    """Callback that trains the first stage only in the last epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.enter, *pl_module.blocks[:2]])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.enter, *pl_module.blocks[:2]], optimizer, lr=0.01)


CASES: dict[str, tuple[type[Net], Callable[[], list[Callback]], dict[str, Any]]] = {
    "hooks": (Busy, list, {}),
    "two passes": (Twice, list, {}),
    "unfreezing": (Rate, lambda: [Unfreeze()], {}),
    "spikes": (NotFinite, lambda: [SpikeGuard("skip")], {}),
    "histograms": (Net, lambda: [HistogramMonitor(4)], {"logger": True}),
    "summary, throughput": (Example, lambda: [RichModelSummary(2), Throughput()], {"log_every_n_steps": 1}),
    "profiler": (Net, list, {"profiler": "simple"}),
    "learning rate": (Rate, list, {}),
    "interleaved": (Counting, lambda: [SpikeGuard("skip")], {}),
    "interleaved, unfreezing": (Rate, lambda: [Unfreeze()], {}),
}


def fit(name: str, num_stages: int, root: Path) -> dict[str, Any]:
    kind, callbacks, options = CASES[name]
    roomier.seed_everything(3)
    net, folder = kind(), tempfile.mkdtemp(dir=root)
    trainer = trainer_of(
        folder,
        num_stages,
        INTERLEAVED if "interleaved" in name else (),
        **{"max_epochs": 2, "enable_checkpointing": False, "callbacks": callbacks(), **options},
    )
    result: dict[str, Any] = {}
    if name == "learning rate":
        curve = lr_find(trainer, net, loader(), num_training=8)  # type: ignore[arg-type]
        assert curve is not None
        result["losses"] = list(curve.losses)
    trainer.fit(net, loader(), loader())
    for path in Path(folder).glob("**/histograms.jsonl"):
        rows = [json.loads(row) for row in path.read_text().splitlines()]
        result["histograms"] = [{key: value for key, value in row.items() if key != "time"} for row in rows]
    rates = {"samples_per_s", "model_flops_per_s"}  # depend on the clock
    result |= {key: float(value) for key, value in trainer.callback_metrics.items() if key not in rates}
    outputs = trainer.predict(net, loader())
    assert outputs is not None
    result["seen"] = len(getattr(net, "seen", ()))
    return {**result, "steps": trainer.global_step, "outputs": torch.cat(outputs)}


def test_features_give_the_results_of_one_process(on_ranks: RankPool, tmp_path: Path) -> None:
    calls = [(name, 2, tmp_path) for name in CASES]
    for name, of_ranks in zip(CASES, on_ranks.each(2, fit, calls), strict=True):
        expected = fit(name, 1, tmp_path)
        histograms = expected.pop("histograms", None)
        assert (histograms is not None) == (name == "histograms")
        assert [found.pop("histograms", None) for found in of_ranks] == [histograms, None]  # rank 0 writes
        for found in of_ranks:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=partial("{}: {}".format, name))
