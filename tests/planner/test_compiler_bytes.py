"""Host memory that the compiler requires for the update of low-bit states, in both kinds of forecasts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.formula.estimate import Estimator
from roomier.planner.formula.fixed_bytes import COMPILER_HOST_BYTES
from roomier.planner.hardware.spec import machine_of
from roomier.planner.workload import Workload
from roomier.techniques.optim.adamw import WORTH_COMPILING
from tests.covering import few


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


@pytest.mark.parametrize(
    ("optimizer", "width", "num_bytes"),
    few(
        [
            ("adamw8bit", 2048, COMPILER_HOST_BYTES),
            ("adamw4bit", 2048, COMPILER_HOST_BYTES),
            ({"name": "adamw8bit", "compiled": False}, 2048, 0),
            ("adamw8bit", 512, 0),
            ("adamw", 2048, 0),
        ]
    ),
    ids=str,
)
def test_a_compiled_update_uses_host_memory(optimizer: Any, width: int, num_bytes: int) -> None:
    assert 512**2 < WORTH_COMPILING <= 2048**2
    with torch.device("meta"):
        workload = Workload.of(Wide(width), (torch.empty(2, width),))
    machine = machine_of("a100-40gb:1")
    plan = plan_from_flags(optimizer=optimizer, accelerator="cuda")
    assert Estimator(workload, machine).estimate(plan, 2).host_bytes == num_bytes
    assert confirm(workload, plan, machine).host_bytes == num_bytes
