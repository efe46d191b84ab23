"""Temporary memory of an update, computed from a few weights and a few blocks of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.core import torch_fake
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.formula.estimate import Estimator, few_alike
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.workload import Workload
from tests.covering import few
from tests.planner.truth import measured_peak

WIDTH = 512
_LINK = Link(1e9)
_RATES = dict.fromkeys(("fp64", "fp32", "tf32", "bf16", "fp16"), 1e12)
_MACHINE = Machine(
    Device("any", "cpu", 80 * 2**30, _RATES, 1e12), 4, 1, _LINK, _LINK, _LINK, _LINK, _LINK, 2**40, "assumed"
)


class Layers(Module):
    def __init__(self, num_layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.network = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch).square().mean()


def plan_of(name: str, **parts: Any) -> Plan:
    return Plan.of({"optimizer": {"name": name, **parts}})


@pytest.mark.parametrize("bits", [4, 8])
def test_a_few_blocks_of_a_weight_have_the_bytes_and_work_of_all(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.of(Layers(2), torch.zeros(2, WIDTH))  # four blocks each
    plan = plan_of(f"adamw{bits}bit", options={"compiled": False})
    few = dry_run(workload, plan)
    monkeypatch.setattr(torch_fake, "few_of", iter)
    every = dry_run(workload, plan)
    assert few.intervals == every.intervals
    assert few.work == every.work


def test_real_tensors_are_processed_in_full() -> None:
    assert list(torch_fake.few_of(range(9))) == list(range(9))
    with torch_fake.fake_tensors():
        assert [(each, torch_fake.num_runs()) for each in torch_fake.few_of(range(9))] == [(0, 1), (1, 7), (8, 1)]
        assert list(torch_fake.few_of(range(3))) == [0, 1, 2]


def test_few_alike_keeps_all_consecutive_pairs() -> None:
    first, second, third = (((size,), torch.float32) for size in (1, 2, 3))
    row = [first, second, first, second, third, third, third, first, second]
    assert few_alike(row) == [first, second, first, second, third, third, first]
    assert few_alike([]) == []


@pytest.mark.parametrize("name", few(["adafactor", "adamw8bit", "lion"]))
def test_temporaries_of_the_previous_weight_are_counted(name: str) -> None:
    workload = Workload.of(Layers(6), torch.zeros(2, WIDTH))
    plan = plan_of(name)
    found = Estimator(workload, _MACHINE).estimate(plan, 2).tensor_bytes
    assert found == pytest.approx(dry_run(workload, plan).peak_bytes, rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_compiled_update_needs_no_temporaries() -> None:
    module, batch = Layers(8, 1024), torch.zeros(8, 1024)
    plan = plan_of("adamw8bit")
    assert dry_run(Workload.of(module, batch), plan).peak_bytes == measured_peak(module, batch, plan).total()
