"""Rows that loggers receive, and runs that stop within an epoch, compared with Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roomier
from roomier import Trainer
from roomier.callbacks import ModelCheckpoint
from tests.covering import few
from tests.lightning.modules import Regression, TwoOptimizers, in_order, pl, torchmetrics
from tests.lightning.rows import Rows, assert_equal_rows, run_with
from tests.ranks.pool import RankPool


def fit(trainer: Any, module: Any) -> None:
    trainer.fit(module, in_order(), in_order(3, seed=5))


class LogsSteps(Regression):
    """Module that logs values of each batch in evaluations."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("value", self.loss(batch), on_step=True, on_epoch=True)
        self.log("index", float(batch_idx), on_step=True, on_epoch=False)
        if batch_idx == 1:
            self.log("sometimes", 1.0, on_step=True, on_epoch=False)

    test_step = validation_step


class ComposedMetrics(Regression):
    """Module that logs metrics and a metric that is composed of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torchmetrics.MeanMetric(), torchmetrics.SumMetric()
        self.both = self.first + 2 * self.second

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.first.update(loss.detach())
        self.second.update(1.0)
        for name in ("first", "second", "both"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        return loss


class AlternatesOptimizers(TwoOptimizers):
    """Module that steps one optimizer per batch, so that each optimizer steps a different number of times."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        optimizer = self.optimizers()[batch_idx % 2]
        self.manual_backward(loss)
        for _ in range(1 + batch_idx % 3):
            optimizer.step()
        optimizer.zero_grad()
        self.log("train_loss", loss)


@pytest.mark.parametrize(
    ("make", "call", "keywords"),
    [
        (LogsSteps, fit, {}),
        (LogsSteps, fit, {"val_check_interval": 0.5, "num_sanity_val_steps": 2}),
        (LogsSteps, lambda t, m: t.test(m, in_order(4), verbose=False), {}),
        (LogsSteps, lambda t, m: t.test(m, [in_order(3), in_order(2, seed=6)], verbose=False), {}),
        (ComposedMetrics, fit, {}),
        (TwoOptimizers, fit, {}),
        (TwoOptimizers, fit, {"log_every_n_steps": 4, "val_check_interval": 5}),
        (AlternatesOptimizers, fit, {"max_steps": 17}),
    ],
)
def test_rows_equal_lightnings(make: Any, call: Any, keywords: dict[str, Any], tmp_path: Path) -> None:
    trainer, _, rows = run_with(Trainer, call, make, tmp_path / "own", **keywords)
    peer, _, expected = run_with(pl.Trainer, call, make, tmp_path / "other", **keywords)
    assert expected.rows
    assert_equal_rows(rows, expected)
    assert trainer.global_step == peer.global_step
    metrics = {name: float(value) for name, value in peer.callback_metrics.items()}
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(metrics, rel=1e-5)


def test_rows_of_evaluation_batches_are_removed_and_written_again_by_a_resumed_run(tmp_path: Path) -> None:
    def steps(folder: Path) -> list[list[str]]:
        rows = [line.split(",") for line in next(folder.glob("version_*/metrics.csv")).read_text().splitlines()]
        chosen = [rows[0].index(name) for name in ("step", "trainer/step", "value_step") if name in rows[0]]
        return [[row[column] for column in chosen] for row in rows if row[rows[0].index("value_step")]]

    def trainer(folder: Path, **keywords: Any) -> Trainer:
        return Trainer(accelerator="cpu", default_root_dir=folder, enable_progress_bar=False, **keywords)

    def data() -> tuple[Any, Any]:
        return in_order(2), in_order(12, seed=5)

    torch.manual_seed(1)
    trainer(tmp_path / "full", max_epochs=3).fit(LogsSteps(), *data())

    torch.manual_seed(1)
    first = trainer(tmp_path / "two", max_epochs=2, callbacks=[ModelCheckpoint(save_top_k=-1)])
    first.fit(LogsSteps(), *data())
    early = min(Path(first.checkpoint_callback.dirpath).glob("epoch=0*"))
    trainer(tmp_path / "two", max_epochs=3).fit(LogsSteps(), *data(), ckpt_path=early)

    assert len(steps(tmp_path / "full")) == 1 + 3 * 12
    assert steps(tmp_path / "two") == steps(tmp_path / "full")
    [lines] = [path.read_text().splitlines() for path in (tmp_path / "two").glob("version_*/metrics.jsonl")]
    assert sum("value_step" in line for line in lines) == 3 * 12


def test_a_value_without_step_and_epoch_is_not_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Logs(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, on_step=False, on_epoch=False, prog_bar=True)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("y", 1.0, on_step=False, on_epoch=False)

    trainer, _, rows = run_with(Trainer, fit, Logs, tmp_path)
    shown = trainer.callback_metrics | trainer.logged_metrics | trainer.progress_bar_metrics
    assert not {"x", "y"} & shown.keys()
    assert not any({"x", "y"} & row.keys() for _, row in rows.rows)
    text = capsys.readouterr().err
    assert [text.count(f"log({name!r}): on_step and on_epoch are both False") for name in "xy"] == [1, 1]
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="not useful"):
        run_with(pl.Trainer, fit, Logs, tmp_path)


class StopsEarly(Regression):
    """Module that requests a stop within the second epoch."""

    stops_in = "on_train_batch_end"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._stop("on_train_batch_start", batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop("on_train_batch_end", batch_idx)

    def _stop(self, hook: str, batch_idx: int) -> None:
        if hook == self.stops_in and self.current_epoch == 1 and batch_idx == 3:
            self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("saves", "keywords"),
    few(
        [
            ({"monitor": "val_loss", "mode": "max", "save_top_k": 2}, {}),
            ({"monitor": "val_loss"}, {"limit_val_batches": 2, "val_check_interval": 0.3}),
            ({"monitor": "val_loss"}, {"check_val_every_n_epoch": 2}),
            ({"monitor": "val_loss"}, {}),
            ({"monitor": "val_loss", "save_on_train_epoch_end": False}, {}),
            ({"monitor": "val_loss"}, {"val_check_interval": 4}),
            ({"monitor": "val_loss"}, {"min_epochs": 2}),
            ({}, {}),
        ],
        3,
    ),
)
def test_a_run_that_stops_within_an_epoch_validates_and_saves(
    saves: dict[str, Any], keywords: dict[str, Any], tmp_path: Path
) -> None:
    runs = []
    for kind in (Trainer, pl.Trainer):
        mine = pl.callbacks.ModelCheckpoint(tmp_path / kind.__module__, **saves)
        given = {"max_epochs": 4, "enable_checkpointing": True, "callbacks": [mine], **keywords}
        runs.append((*run_with(kind, fit, StopsEarly, tmp_path / "logs", **given), mine))
    (trainer, _, rows, own), (peer, _, expected, other) = runs
    assert_equal_rows(rows, expected)
    assert trainer.global_step == peer.global_step
    assert Path(own.best_model_path).name == Path(other.best_model_path).stem
    if saves:
        assert float(own.best_model_score) == pytest.approx(float(other.best_model_score), rel=1e-5)
    assert sorted(Path(each).name for each in own.best_k_models) == sorted(
        Path(each).stem for each in other.best_k_models
    )


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_a_stop_in_the_first_epoch_has_a_best_checkpoint(hook: str, tmp_path: Path) -> None:
    class Stops(StopsEarly):
        stops_in = hook
        current_epoch = 1

    mine = ModelCheckpoint(monitor="val_loss")
    keywords: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [mine]}
    trainer, _, _ = run_with(Trainer, fit, Stops, tmp_path, **keywords)
    assert trainer.global_step == 4
    assert Path(mine.best_model_path).name == "epoch=0-step=4"
    assert float(mine.best_model_score) == pytest.approx(float(trainer.callback_metrics["val_loss"]))


def test_max_time_within_an_epoch_validates_and_saves(tmp_path: Path) -> None:
    class TakesLong(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.run.now.started_s -= 3600

    mine = ModelCheckpoint(monitor="val_loss")
    keywords: dict[str, Any] = {"max_time": {"hours": 1}, "enable_checkpointing": True, "callbacks": [mine]}
    trainer, _, _ = run_with(Trainer, fit, TakesLong, tmp_path, **keywords)
    assert trainer.global_step == 3
    assert Path(mine.best_model_path).name == "epoch=0-step=3"


def test_checkpoint_callbacks_of_lightning_are_found_by_class_and_identity(tmp_path: Path) -> None:
    mine = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", filename="mine")
    seen: list[Any] = []

    class Looks(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.extend(each for each in trainer.callbacks if isinstance(each, pl.callbacks.ModelCheckpoint))
            assert mine in trainer.callbacks
            assert trainer.callbacks.index(mine) >= 0
            assert trainer.checkpoint_callback is mine

    keywords: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [mine, Looks()]}
    trainer, _, _ = run_with(Trainer, fit, Regression, tmp_path, **keywords)
    assert [each.best_model_path for each in seen] == [mine.best_model_path]
    assert isinstance(seen[0], ModelCheckpoint)
    assert seen[0].format_checkpoint_name({"epoch": torch.tensor(1)}) == str(tmp_path / "mine.ckpt")
    assert trainer.checkpoint_callbacks == [mine]
    assert Path(mine.best_model_path).is_dir()


class SeesLoss(roomier.Module):
    """Module that records the loss that the hook receives, and the loss of this rank."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.loss_reduction = reduction  # type: ignore[assignment]
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.own: list[float] = []
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1], reduction=self.loss_reduction)
        self.own.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def losses_on_a_rank(folder: str, strategy: Any, accumulate: int, reduction: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    module = SeesLoss(reduction)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, accumulate_grad_batches=accumulate, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    trainer.fit(module, DataLoader(data, 4))
    return module.own, module.seen


@pytest.mark.parametrize("strategy", few(["ddp", "zero1", "zero2", "zero3", {"name": "hsdp", "shard_size": 2}]))
@pytest.mark.parametrize(("accumulate", "reduction"), few([(2, "mean"), (1, "mean"), (1, "sum")]))
def test_the_hook_receives_the_loss_of_its_rank(
    on_ranks: RankPool, strategy: Any, accumulate: int, reduction: str, tmp_path: Path
) -> None:
    for own, seen in on_ranks(2, losses_on_a_rank, str(tmp_path), strategy, accumulate, reduction):
        assert len(own) == 4
        assert seen == pytest.approx([loss / accumulate for loss in own], rel=1e-5)


def stop_on_a_rank(folder: str) -> tuple[int, str, float]:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 2:
                trainer.should_stop = True

    torch.manual_seed(0)
    mine = ModelCheckpoint(monitor="val_loss")
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[Stops(), mine],
    )  # fmt: skip
    trainer.fit(Regression(), in_order(), in_order(4, seed=5))
    return trainer.global_step, Path(mine.best_model_path).name, float(mine.best_model_score)


@pytest.mark.more
def test_a_stop_of_one_rank_validates_on_all_ranks(on_ranks: RankPool, tmp_path: Path) -> None:
    first, second = on_ranks(2, stop_on_a_rank, str(tmp_path))
    assert first == second
    assert first[0] < 5  # the epoch has 5 batches on each rank
    assert first[1] == f"epoch=0-step={first[0]}"


def test_rows_helper_detects_differences() -> None:
    one, other = Rows(), Rows()
    one.rows, other.rows = [(1, {"epoch": 0.0, "x": 1.0})], [(0, {"epoch": 0.0, "x": 1.1})]
    with pytest.raises(AssertionError):
        assert_equal_rows(one, other)
