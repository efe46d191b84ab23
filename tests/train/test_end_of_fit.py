"""A fit ends with a row for its last step and one line that summarizes the run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import roomier
from roomier.callbacks import EarlyStopping, MemoryForecast, ModelCheckpoint
from roomier.core.errors import TrainingError
from roomier.run.checks import MAX_BATCHES_BEFORE_FIRST_STEP
from tests.planner.page_examples import GIB, record
from tests.ranks.pool import RankPool

BATCHES = [torch.full((2, 1), number / 7) for number in range(7)]


class Learns(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        self.log("index", float(batch_idx), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())
        self.log("val_other", 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("keywords", "reason", "last"),
    [
        ({"max_epochs": 2}, "training is complete: max_epochs=2 is reached after step 14", (14, 1, 6)),
        ({"max_steps": 9}, "training is complete: max_steps=9 is reached after step 9", (9, 1, 1)),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, "max_epochs=2 is reached after step 4", (4, 1, 6)),
        (
            {"max_epochs": 9, "callbacks": [EarlyStopping("val_other", patience=2)]},
            "training was stopped by trainer.should_stop",
            (21, 2, 6),
        ),
    ],
)
def test_last_step_is_logged_and_reported(
    keywords: dict[str, Any], reason: str, last: tuple[int, int, int], make_trainer: Any, rows: Any, capsys: Any
) -> None:
    make_trainer(logger=rows, num_sanity_val_steps=0, **keywords).fit(Learns(), BATCHES, BATCHES)
    [(step, row)] = [(step, row) for step, row in rows.rows if "loss" in row]
    assert (step, row["epoch"], row["index_step"]) == last
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("roomier: ")
    assert reason in line
    assert f"| loss {row['loss']:.4g}" in line
    values = rows.column("val_loss")
    assert (f"| val_loss {values[-1]:.4g}" in line) == bool(values)
    assert "val_other" not in line


def test_last_step_is_logged_once(make_trainer: Any, rows: Any) -> None:
    make_trainer(logger=rows, max_epochs=2, log_every_n_steps=7).fit(Learns(), BATCHES)
    assert rows.steps("loss") == [7, 14]


def test_files_and_forecast_are_reported(tmp_path: Any, capsys: Any) -> None:
    forecast = MemoryForecast()
    callbacks = [ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=2, filename="{epoch}"), forecast]
    keywords = {"default_root_dir": tmp_path, "accelerator": "cpu", "max_epochs": 2, "callbacks": callbacks}
    trainer = roomier.Trainer(**keywords, enable_model_summary=False)
    trainer.fit(Learns(), BATCHES, BATCHES)
    *_, drawn, line = capsys.readouterr().err.splitlines()
    assert "epoch 1/1 | step 14/14" in drawn or drawn.startswith("validation")
    assert f"| run folder {trainer.log_dir} | last checkpoint checkpoints/epoch=1 | best checkpoint" in line
    assert re.search(r"best checkpoint checkpoints/epoch=0( |$)", line)
    assert forecast.record is not None
    assert line.endswith(forecast.record.line())


def test_bar_ends_at_the_last_step(tmp_path: Any, capsys: Any) -> None:
    keywords: dict[str, Any] = {"enable_model_summary": False, "enable_plan_table": False, "logger": False}
    roomier.Trainer(default_root_dir=tmp_path, accelerator="cpu", max_epochs=2, **keywords).fit(Learns(), BATCHES)
    bar, _ = capsys.readouterr().err.splitlines()[-2:]
    assert re.match(r"epoch 1/1 \| step 14/14 \| [\d.]+ it/s \| [\d.]+( K)? samples/s \| train_loss ", bar)


def losses_of_ranks(root: Any) -> tuple[list[float], list[float]]:
    class Keeps(roomier.Logger):
        name = "keeps"
        found: list[float] = []  # noqa: RUF012 - one object for this call

        def log_metrics(self, metrics: Any, step: int) -> None:
            self.found += [metrics["loss"]] if "loss" in metrics else []

    keeps = Keeps()
    keeps.found = []
    keywords = {"default_root_dir": root, "accelerator": "cpu", "enable_progress_bar": False, "logger": keeps}
    trainer = roomier.Trainer(strategy="ddp", devices=2, max_epochs=1, enable_checkpointing=False, **keywords)
    trainer.fit(Learns(), BATCHES[:6])
    own = trainer.run.results.logged_loss
    return keeps.found, [own]


def test_loss_of_the_last_step_is_of_all_ranks(on_ranks: RankPool, tmp_path: Any) -> None:
    (logged, [first]), (nothing, [second]) = on_ranks(2, losses_of_ranks, tmp_path)
    assert logged == [first]
    assert (nothing, second) == ([], first)


class Late(Learns):
    """Module whose only loss comes after the limit."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum() if batch_idx == MAX_BATCHES_BEFORE_FIRST_STEP + 5 else None


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield torch.ones(1)


def test_batches_without_a_loss_end_a_run_only_if_the_length_is_unknown(make_trainer: Any) -> None:
    trainer = make_trainer(max_epochs=1)
    trainer.fit(Late(), [torch.ones(1, 1)] * (MAX_BATCHES_BEFORE_FIRST_STEP + 10))
    assert trainer.global_step == 1
    with pytest.raises(TrainingError, match=f"first {MAX_BATCHES_BEFORE_FIRST_STEP} batches"):
        make_trainer(max_epochs=1).fit(Late(), DataLoader(Endless(), batch_size=1))


def test_forecast_includes_the_workspaces_that_the_allocator_counts() -> None:
    plain, allocated = record(), record(allocator_bytes=30 * GIB)
    assert plain.forecast_bytes == plain.forecast.tensor_bytes
    workspace = allocated.forecast.fixed_bytes["workspace"]
    assert allocated.forecast_bytes - allocated.forecast.tensor_bytes == workspace > 0
