"""Values that are logged on several ranks are identical on all ranks, and the first rank writes the rows."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

import roomier
from roomier import Logger
from roomier.callbacks import EarlyStopping, Throughput
from roomier.core.errors import RoomierError, TrainingError
from roomier.run.logged.entry import RankEntry, reduce_over_ranks
from tests.covering import few

QUIET = {
    "accelerator": "cpu",
    "enable_checkpointing": True,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Rows(Logger):
    name = "rows"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append(dict(metrics))

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


class Means(roomier.Module):
    """Module in which the loss of a sample is the sample. The weight does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def training_step(self, batch, batch_idx):
        loss = (batch * self.weight.mean()).mean()
        self.on_batch(batch, loss)
        return loss

    def on_batch(self, batch, loss):
        self.log("own", loss)
        self.log("synced", loss, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=True, sync_dist=True, reduce_fx="max")
        self.log("first only", float(self.global_rank), on_step=False, on_epoch=True, rank_zero_only=True)
        if self.global_rank == 1:
            self.log("second only", 7.0, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(module: roomier.Module, size: int, root: Any, **keywords: Any) -> tuple[roomier.Trainer, Rows]:
    rows = Rows()
    keywords = {**QUIET, "max_epochs": 1, "log_every_n_steps": 1, "logger": rows, **keywords}
    spread = {"strategy": "ddp", "devices": size} if size > 1 else {}
    trainer = roomier.Trainer(**spread, default_root_dir=root, **keywords)
    loader = DataLoader(torch.arange(10.0), batch_size=4 // size)  # windows of 4, 4 and 2 samples
    trainer.fit(module, loader)
    return trainer, rows


def log_means(size: int, root: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    trainer, rows = fit(Means(), size, root)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, rows.rows


def test_values_of_steps_and_epochs(on_ranks, tmp_path):
    (first, rows), (second, rows_of_second) = on_ranks(2, log_means, 2, tmp_path)
    assert rows_of_second == []
    assert first == second
    column = {name: [row[name] for row in rows if name in row] for row in rows for name in row}
    assert column["loss"] == pytest.approx([1.5, 5.5, 8.5])  # loss of the global batch
    assert column["synced"] == pytest.approx([1.5, 5.5, 8.5])
    assert column["own"] == pytest.approx([1.0, 5.0, 8.0])  # samples 0 and 2 belong to the first rank
    assert column["largest"] == pytest.approx([2.0, 6.0, 9.0])
    assert column["both_epoch"] == pytest.approx([4.5])
    assert (first["first only"], first["second only"]) == (0.0, 7.0)
    assert first["own"] == pytest.approx(8.5)  # identical on all ranks at the end of an epoch
    assert first["both"] == pytest.approx(4.5)


class Weighs(Means):
    def on_batch(self, batch, loss):
        self.log("by samples", loss, on_step=False, on_epoch=True)
        self.log("by hand", loss, on_step=False, on_epoch=True, batch_size=batch.sum())

    def on_train_epoch_end(self):
        self.read = float(self.trainer.callback_metrics["by samples"])
        self.log("at the end", float(self.global_rank))


class Late(roomier.Callback):
    monitors = True  # called after the hook of the module

    def on_train_epoch_end(self, trainer, pl_module):
        self.read = float(trainer.callback_metrics["at the end"])


def log_weighted(size: int, root: Any) -> tuple[float, ...]:
    late, module = Late(), Weighs()
    trainer, _ = fit(module, size, root, callbacks=[late])
    metrics = trainer.callback_metrics
    return module.read, late.read, float(metrics["by samples"]), float(metrics["by hand"])


@pytest.mark.more
def test_hooks_at_the_end_of_an_epoch_read_values_of_all_ranks(on_ranks, tmp_path):
    [alone] = [log_weighted(1, tmp_path)]
    for read, late, by_samples, by_hand in on_ranks(2, log_weighted, 2, tmp_path):
        assert read == by_samples == pytest.approx(alone[0])
        assert late == 0.5
        assert by_hand == pytest.approx((1 * 2 + 2 * 4 + 5 * 10 + 6 * 12 + 8 * 8 + 9 * 9) / 45)


class Gathers(Means):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.cat = MeanMetric(), CatMetric()

    def on_batch(self, batch, loss):
        self.mean.update(batch)
        self.cat.update(batch)
        self.log("mean", self.mean, on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        self.gathered = sorted(self.cat.compute().tolist())


def gather_metrics(root: Any) -> tuple[float, list[float]]:
    module = Gathers()
    trainer, _ = fit(module, 2, root)
    return float(trainer.callback_metrics["mean"]), module.gathered


def test_metric_objects_compute_over_all_ranks(on_ranks, tmp_path):
    assert on_ranks(2, gather_metrics, tmp_path) == [(4.5, list(map(float, range(10))))] * 2


class Unequal(Gathers):
    def on_batch(self, batch, loss):
        if self.global_rank:
            super().on_batch(batch, loss)

    def on_train_epoch_end(self):
        pass


class Differently(Means):
    def on_batch(self, batch, loss):
        self.log("v", loss, on_step=True, on_epoch=bool(self.global_rank))


def error_of(kind: type[Means], root: Any) -> str:
    try:
        fit(kind(), 2, root)
    except RoomierError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    few(
        [
            (Unequal, "torchmetrics objects compute over all ranks. Ranks [0] did not log it"),
            (Differently, "on_epoch=False and, on rank 1, True"),
        ]
    ),
)
def test_values_that_cannot_be_reduced_end_all_ranks(on_ranks, tmp_path, kind: type[Means], text: str):
    for error in on_ranks(2, error_of, kind, tmp_path):
        assert text in error


class Breaks(Means):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_rank == 1 and batch_idx == 1 else loss


def break_loss(root: Any) -> tuple[str, int]:
    try:
        fit(Breaks(), 2, root)
    except TrainingError as error:
        return str(error), 2
    return "", 0


def test_loss_that_is_not_finite_on_one_rank_ends_all_ranks(on_ranks, tmp_path):
    for error, _ in on_ranks(2, break_loss, tmp_path):
        assert "loss=nan: is not finite on rank 1 at step 2" in error


class Plateau(Means):
    """Each rank has a different loss, but the learning rates must stay equal."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        scheduler = {"scheduler": plateau, "monitor": "v", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_batch(self, batch, loss):
        falls, rises = [3.0, 2.0, 1.0], [3.0, 4.0, 5.5]
        self.log("v", (falls, rises)[self.global_rank][self.global_step])

    def on_train_end(self):
        self.rate = self.trainer.optimizers[0].param_groups[0]["lr"]


def reduce_rates(root: Any) -> float:
    module = Plateau()
    fit(module, 2, root)
    return module.rate


@pytest.mark.more
def test_plateau_uses_values_of_all_ranks(on_ranks, tmp_path):
    # The means are 3, 3 and 3.25, so the metric does not improve twice.
    assert on_ranks(2, reduce_rates, tmp_path) == [0.25, 0.25]


class Worsens(Means):
    def on_train_epoch_end(self):
        self.log("v", float(self.current_epoch) if self.global_rank else -3.0 * self.current_epoch)


def stop_early(root: Any) -> int:
    trainer, _ = fit(Worsens(), 2, root, max_epochs=5, callbacks=[EarlyStopping("v", mode="max", patience=1)])
    return trainer.current_epoch


@pytest.mark.more
def test_early_stopping_acts_immediately_on_all_ranks(on_ranks, tmp_path):
    # The value increases only on the second rank. The mean decreases, so the second epoch is the last epoch.
    assert on_ranks(2, stop_early, tmp_path) == [2, 2]


class Counted(Means):
    def on_batch(self, batch, loss):
        pass


class Clock:
    """Clock that advances by one second with each call."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1
        return self.now_s


def throughput(root: Any) -> list[float]:
    roomier.callbacks.throughput.time = Clock()
    _, rows = fit(Counted(), 2, root, callbacks=[Throughput()], log_every_n_steps=3)
    return rows.column("samples_per_s")


@pytest.mark.more
def test_throughput_counts_the_samples_of_all_ranks(on_ranks, tmp_path):
    # The first step starts the clock. The following steps have 4 and 2 samples.
    assert on_ranks(2, throughput, tmp_path) == [[6.0], []]


def entry(total: float | None = None, weight: float = 0.0, fx: str = "mean", step: float | None = None) -> RankEntry:
    return RankEntry((True, True, False, True, fx), total, weight, step, 1.0, 0, False)


@pytest.mark.parametrize(
    ("fx", "by_rank", "value"),
    [
        ("mean", [entry(6.0, 3.0), entry(2.0, 1.0)], 2.0),
        ("mean", [entry(), entry(2.0, 1.0)], 2.0),
        ("mean", [entry(), entry()], None),
        ("sum", [entry(6.0, fx="sum"), entry(2.0, fx="sum")], 8.0),
        ("min", [entry(6.0, fx="min"), entry(2.0, fx="min")], 2.0),
        ("max", [entry(6.0, fx="max"), entry(float("nan"), fx="max")], float("nan")),
    ],
)
def test_reductions(fx: str, by_rank: list[RankEntry], value: float | None):
    [reduced] = reduce_over_ranks([{("x", True): each} for each in by_rank]).values()
    assert reduced.epoch_value == (value if value is None else pytest.approx(value, nan_ok=True))
