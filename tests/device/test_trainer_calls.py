"""Calls of the Trainer on the simulated accelerator: planning, loggers, callbacks, evaluation and prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roomier.callbacks import DeviceStatsMonitor, MemoryForecast
from tests.device.runs import NUM_STEPS, RELATIVE, Language, difference, loader, trainer_of, weights_of
from tests.simulator import simulated
from tests.simulator.workers import SimulatedRanks

DEVICE = simulated.DEVICE
WIDTH = 64
ALLOCATED = "DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.current"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("version_*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluate(folder: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of a fit, a validation, a test and a prediction."""
    found: dict[str, Any] = {}
    for accelerator in ("cpu", DEVICE):
        module = Language(WIDTH)
        trainer = trainer_of(folder, accelerator, enable_checkpointing=False, **keywords)
        trainer.fit(module, loader(), loader(3))
        validated = float(trainer.callback_metrics["val_loss"])
        predictions = trainer.predict(module, loader(3))
        assert predictions is not None
        streamed = list(trainer.predict_stream(module, loader(3)))
        assert {each.device.type for each in (*predictions, *streamed)} == {"cpu"}, "they do not fill the device"
        found[accelerator] = {
            "fit": validated,
            "validate": trainer.validate(module, loader(3))[0]["val_loss"],
            "test": trainer.test(module, loader(3))[0]["test_loss"],
            "predict": [float(each) for each in predictions],
            "predict_stream": [float(each) for each in streamed],
        }
    return {"races": simulated.races(), **found}


@pytest.mark.parametrize(
    ("num_ranks", "keywords", "schedule"),
    [(1, {}, "LATE"), (2, {"strategy": "zero3", "devices": 2}, "OTHERS_FIRST")],
    ids=["single", "zero3"],
)
def test_evaluation_and_prediction_compute_the_numbers_of_the_cpu(
    on_simulated: SimulatedRanks, tmp_path: Path, num_ranks: int, keywords: dict[str, Any], schedule: str
) -> None:
    for found in on_simulated(num_ranks, evaluate, tmp_path, keywords, schedule=schedule):
        assert found["races"] == []
        for stage, value in found["cpu"].items():
            assert found[DEVICE][stage] == pytest.approx(value, rel=RELATIVE)


class Gathering(Language):
    """Module that gathers batches, which a different stream copies to the device, and losses with gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens = self.all_gather(batch[0]).flatten(0, 1)
        loss: torch.Tensor = self.network(tokens)
        mean: torch.Tensor = self.all_gather(loss, sync_grads=True).mean()
        return mean


def train_on_gathered_batches(folder: Path) -> tuple[float, list[str]]:
    """Return the difference from the CPU, and the races."""
    found = {}
    for accelerator in ("cpu", DEVICE):
        module = Gathering()
        trainer_of(folder, accelerator, enable_checkpointing=False, devices=2, strategy="ddp").fit(module, loader(8))
        found[accelerator] = weights_of(module)
    return difference(found[DEVICE], found["cpu"]), simulated.races()


@pytest.mark.parametrize("schedule", ["LATE", "OTHERS_FIRST", "IMMEDIATE"])
def test_gathered_batches(on_simulated: SimulatedRanks, tmp_path: Path, schedule: str) -> None:
    for relative, races in on_simulated(2, train_on_gathered_batches, tmp_path, schedule=schedule):
        assert races == []
        assert relative <= RELATIVE


def monitor(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the logged rows and the races."""
    callbacks = [MemoryForecast(at_step=3), DeviceStatsMonitor()]
    trainer = trainer_of(folder, DEVICE, callbacks, enable_checkpointing=False, logger=True, log_every_n_steps=1)
    trainer.fit(Language(256), loader())
    return rows_of(folder), simulated.races()


def test_callbacks_read_the_memory_of_the_device(on_simulated: SimulatedRanks, tmp_path: Path) -> None:
    (found,) = on_simulated(1, monitor, tmp_path)
    rows, races = found
    assert races == []
    merged = {name: value for row in rows for name, value in row.items()}
    assert merged["memory/measured_bytes"] == pytest.approx(merged["memory/forecast_bytes"], rel=0.01)
    allocated = [row[ALLOCATED] for row in rows if ALLOCATED in row]
    assert len(allocated) == NUM_STEPS
    assert 0 < max(allocated) < merged["memory/measured_bytes"]  # between steps, there are no activations


def plan_and_fit(folder: Path) -> tuple[int, float, int, list[str]]:
    """Return the number of micro-batches in the plan, the difference from the CPU, the peak and the races."""
    module, on_cpu = Language(WIDTH), Language(WIDTH)
    trainer = trainer_of(folder, DEVICE, enable_checkpointing=False, strategy="auto")
    trainer.fit(module, loader(batch_size=16))
    peak = torch.accelerator.max_memory_allocated()
    trainer_of(folder, "cpu", enable_checkpointing=False).fit(on_cpu, loader(batch_size=16))
    relative = difference(weights_of(module), weights_of(on_cpu))
    return trainer.plan.batch.accumulate_grad_batches, relative, peak, simulated.races()


def test_auto_finds_a_plan_that_fits_the_device(on_simulated: SimulatedRanks, tmp_path: Path) -> None:
    (large,) = on_simulated(1, plan_and_fit, tmp_path)
    limit = int(0.9 * large[2])
    (small,) = on_simulated(1, plan_and_fit, tmp_path, memory_limit=limit, schedule="OTHERS_FIRST")
    assert large[0] == 1
    assert small[0] > 1, "two micro-batches need less memory"
    assert small[2] <= limit
    for _, relative, _, races in (large, small):
        assert relative <= RELATIVE
        assert races == []
