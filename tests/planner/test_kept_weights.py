"""Copies of the weights that callbacks keep are included in plans, forecasts and measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.api.callback import KeptWeights
from roomier.callbacks import Callback, EMAWeightAveraging, MemoryForecast, StochasticWeightAveraging
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.spec import machine_of
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.memory.kinds import Kind
from roomier.planner.workload import Workload
from roomier.trainer import Trainer
from tests.covering import few
from tests.ranks.pool import RankPool

Make = Callable[..., Trainer]
TRAINED, STATISTICS = 64 * 129 + 2 * 129 + 129 * 64 + 64, 2 * 129  # one bias is frozen; a counter is an integer


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 129), nn.BatchNorm1d(129), nn.Linear(129, 64))
        self.network[0].bias.requires_grad_(False)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.network(batch).square().mean()


WORKLOAD = Workload.of(Net(), torch.zeros(4, 64))


@pytest.mark.parametrize(
    ("strategy", "devices", "precision"),
    few(
        [
            ("single", 1, "32-true"),
            ("zero1", 4, "bf16-true"),
            pytest.param("ddp", 2, "32-true", marks=pytest.mark.slow),
            pytest.param("zero2", 4, "32-true", marks=pytest.mark.slow),
            pytest.param("zero3", 4, "bf16-mixed", marks=pytest.mark.slow),
        ]
    ),
)
def test_a_copy_is_counted_by_dry_run_and_closed_form_in_its_sharded_size(
    strategy: str, devices: int, precision: str
) -> None:
    plan = plan_from_flags(
        strategy=strategy, devices=devices, precision=precision, optimizer="adamw", accelerator="cpu"
    )
    copied, machine = replace(WORKLOAD, copies=(KeptWeights(with_buffers=True),)), this_machine(devices, 1, "cpu")
    # sizes of dimension 0, which is sharded, and of the other dimensions
    trained = [(129, 64), (129, 1), (129, 1), (64, 129), (64, 1)]
    num_shards = devices if strategy.startswith("zero") else 1
    own = sum(-(-first // num_shards) * rest for first, rest in trained)
    expected = 4 * (own + STATISTICS)  # copies are in float32 for any dtype of the weights
    assert dry_run(copied, plan).peak_bytes - dry_run(WORKLOAD, plan).peak_bytes == expected
    before, after = (Estimator(each, machine).estimate(plan, 4).bytes_by_kind for each in (WORKLOAD, copied))
    assert after[Kind.PARAMETER] - before[Kind.PARAMETER] == expected
    assert sum(after.values()) - sum(before.values()) == expected


def test_a_copy_in_host_memory_needs_no_gpu_memory() -> None:
    plan = plan_from_flags(optimizer="adamw", accelerator="cuda")
    on_host = replace(WORKLOAD, copies=(KeptWeights(device=torch.device("cpu")),))
    assert dry_run(on_host, plan, like="cuda").peak_bytes == dry_run(WORKLOAD, plan, like="cuda").peak_bytes
    estimates = (Estimator(each, machine_of("a100")).estimate(plan, 4).peak_bytes for each in (on_host, WORKLOAD))
    assert len(set(estimates)) == 1
    assert dry_run(on_host, plan).peak_bytes - dry_run(WORKLOAD, plan).peak_bytes == 4 * TRAINED


def fitted(make: Make, *callbacks: Callback, **keywords: Any) -> Any:
    forecast = MemoryForecast()
    given = {"optimizer": "adamw", "learning_rate": 1e-3, "max_steps": 3, "accelerator": "cpu", **keywords}
    trainer = make(callbacks=[forecast, *callbacks], **given)
    trainer.fit(Net(), [torch.ones(4, 64)] * 3)
    assert forecast.record is not None
    return trainer, forecast.record


def test_the_forecast_of_a_run_with_averaging_equals_the_measurement(make_trainer: Make) -> None:
    _, plain = fitted(make_trainer)
    _, averaging = fitted(make_trainer, EMAWeightAveraging())
    expected = 4 * (TRAINED + STATISTICS)
    assert averaging.forecast_bytes - plain.forecast_bytes == expected
    assert averaging.measured_bytes - plain.measured_bytes == expected
    assert averaging.worst.peak.peak[Kind.PARAMETER] == averaging.forecast.bytes_by_kind[Kind.PARAMETER]


def test_auto_counts_what_callbacks_will_keep_and_says_what_is_not_there_yet(make_trainer: Make) -> None:
    later = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1.0)
    keywords = {"strategy": "auto", "max_epochs": 5}
    plain, record = fitted(make_trainer, **keywords)
    averaging, with_note = fitted(make_trainer, later, **keywords)
    assert plain.choice is not None
    assert averaging.choice.chosen.tensor_bytes - plain.choice.chosen.tensor_bytes == 4 * TRAINED
    note = "The forecast includes the copy of the weights that StochasticWeightAveraging creates later."
    assert note in with_note.notes
    assert note not in record.notes


def averaged_on_two() -> tuple[int, int]:
    def make(**keywords: Any) -> Trainer:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        return Trainer(strategy="zero2", devices=2, enable_model_summary=False, **quiet, **keywords)

    _, record = fitted(make, EMAWeightAveraging(use_buffers=False))
    return record.forecast_bytes, record.measured_bytes


@pytest.mark.more
def test_each_rank_averages_and_counts_its_shard(on_ranks: RankPool) -> None:
    [(forecast_bytes, measured_bytes), _] = on_ranks(2, averaged_on_two)
    assert forecast_bytes == pytest.approx(measured_bytes, rel=0.001)
