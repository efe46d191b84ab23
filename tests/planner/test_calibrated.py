"""Calibration with a measured run: activations of the model, and device memory outside of tensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.callbacks import MemoryForecast
from roomier.core.errors import RoomierError
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.formula.estimate import Estimator
from roomier.planner.formula.fixed_bytes import MIB, fixed_bytes
from roomier.planner.hardware import cache
from roomier.planner.hardware.spec import machine_of
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.measured.calibrated import activation_factor, learn_device, learned_of
from roomier.planner.measured.record import ForecastRecord, read_record, record_from
from roomier.planner.memory.kinds import Kind
from roomier.planner.workload import Workload
from tests.planner.page_examples import GIB, record

pytestmark = pytest.mark.more

PLAN = plan_from_flags(optimizer="adamw", accelerator="cpu")


class Routed(roomier.Module):
    """A model in which the values of the samples determine how many samples enter the wide layers. A forecast does not
    have these values."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)
        self.wide = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        kept = batch[batch[:, 0] > 1.5]
        return self.wide(kept).square().mean() + self.score(batch).square().mean()


def batch_of(num_samples: int) -> Tensor:
    """Return a batch in which a quarter of the samples has a high score."""
    batch = torch.zeros(num_samples, 8)
    batch[::4, 0] = 2.0
    return batch


def measured(make_trainer: Callable[..., Any], num_samples: int) -> ForecastRecord:
    callback = MemoryForecast()
    trainer = make_trainer(callbacks=[callback], optimizer="adamw", learning_rate=1e-3, max_steps=2, accelerator="cpu")
    trainer.fit(Routed(), [batch_of(num_samples)] * 2)
    assert callback.record is not None
    return callback.record


def test_a_calibrated_forecast_is_closer_to_another_run(make_trainer: Callable[..., Any]) -> None:
    learned, truth = measured(make_trainer, 512), measured(make_trainer, 1024).measured_bytes
    workload, machine = Workload.of(Routed(), batch_of(1024)), this_machine(1, 1, "cpu")
    before = confirm(workload, PLAN, machine).peak_bytes
    after = learned_of(workload, learned, machine, "runs/version_0")
    assert before < 0.5 * truth, "otherwise calibration has no effect"
    assert abs(confirm(after, PLAN, machine).peak_bytes / truth - 1) < 0.05
    assert abs(Estimator(after, machine).estimate(PLAN, 1024).peak_bytes / truth - 1) < 0.05


def test_an_exact_forecast_gives_a_factor_of_1() -> None:
    found = record(num_ranks=1)
    same = dataclasses.replace(found.ranks[0], timeline=found.forecast.timeline)
    assert activation_factor(dataclasses.replace(found, ranks=(same,))) == 1.0


@pytest.mark.parametrize("times", [0.5, 1.04, 3.0])
def test_a_calibrated_forecast_of_the_same_run_has_the_measured_peak(times: float) -> None:
    found = record(num_ranks=1)
    measured_bytes = int(found.forecast_bytes * times)
    held = {Kind.ACTIVATION: measured_bytes}
    peak = dataclasses.replace(found.forecast.timeline[0], peak=held)
    factor = activation_factor(
        dataclasses.replace(found, ranks=(dataclasses.replace(found.ranks[0], timeline=(peak,)),))
    )
    again = max(each.with_activations(factor).peak_bytes for each in found.forecast.timeline)
    assert again == pytest.approx(measured_bytes, abs=2)


def test_calibration_does_not_change_a_plan_with_an_activation_budget() -> None:
    found = record(num_ranks=1).forecast
    budget = plan_from_flags(activation_checkpointing="1GiB")
    workload = dataclasses.replace(Workload.of(Routed(), batch_of(4)), activation_factor=2.0)
    assert workload.calibrated(found.timeline, budget) == found.timeline
    assert workload.calibrated(found.timeline, PLAN) != found.timeline


def test_runs_that_do_not_match_are_rejected() -> None:
    workload, machine = Workload.of(Routed(), batch_of(4)), machine_of("a100-40gb")
    own = record(num_ranks=1)
    with pytest.raises(RoomierError, match="'runs': is a run of a model with 5 parameters, but this model has 1,"):
        learned_of(workload, dataclasses.replace(own, num_parameters=5), machine, "runs")
    with pytest.raises(RoomierError, match="ran on cuda, but the plan is for cpu"):
        learned_of(workload, own, this_machine(1, 1, "cpu"), "runs")
    few = dataclasses.replace(own.ranks[0], allocator_bytes=GIB)
    with pytest.raises(
        RoomierError, match=r"measured 1.0 GiB, but no activation factor explains this value for a forecast of"
    ):
        learned_of(workload, dataclasses.replace(own, ranks=(few,)), machine, "runs")


def test_a_calibrated_forecast_of_a_gpu_has_the_measured_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "cache_file", lambda: tmp_path / "hardware.json")
    own = record(num_ranks=1)
    forecast = dataclasses.replace(own.forecast, fixed_bytes=fixed_bytes(own.forecast.plan, own.forecast.machine, GIB))
    allocated = int(own.forecast_bytes * 1.2)
    rank = dataclasses.replace(
        own.ranks[0], allocator_bytes=allocated, reserved_bytes=allocated + 3 * GIB, beside_bytes=1900 * MIB
    )
    learned = dataclasses.replace(own, forecast=forecast, ranks=(rank,))
    assert learn_device(learned) is not None
    factor = activation_factor(learned)
    tensor_bytes = max(each.with_activations(factor).peak_bytes for each in forecast.timeline)
    fixed = fixed_bytes(forecast.plan, forecast.machine, tensor_bytes)
    assert tensor_bytes + fixed["workspace"] == pytest.approx(allocated, abs=2)
    assert tensor_bytes + sum(fixed.values()) == pytest.approx(allocated + 3 * GIB + 1900 * MIB, abs=1000)
    assert learn_device(record()) is None, "the record has no values of the allocator"


def test_a_record_keeps_all_values_and_older_records_can_be_read() -> None:
    own = record(num_ranks=1)
    rank = dataclasses.replace(own.ranks[0], allocator_bytes=3, reserved_bytes=4, beside_bytes=5)
    kept = dataclasses.replace(own, ranks=(rank,), num_parameters=7)
    stored = json.loads(json.dumps(kept.as_dict()))
    assert record_from(stored) == kept
    del stored["num_parameters"], stored["measured"][0]["reserved_bytes"], stored["measured"][0]["beside_bytes"]
    before = record_from(stored)
    assert (before.num_parameters, before.ranks[0].reserved_bytes) == (None, None)


def test_the_run_folder_contains_the_number_of_parameters(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(
        callbacks=[MemoryForecast()],
        optimizer="adamw",
        learning_rate=1e-3,
        max_steps=2,
        logger=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(Routed(width=2), [batch_of(4)] * 2)
    assert read_record(Path(trainer.log_dir)).num_parameters == 8 + 1 + 16 + 2 + 2 + 1
