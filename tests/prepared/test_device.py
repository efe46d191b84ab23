"""A script on a device computes the same numbers as on the CPU, without races between its streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.prepared.scripts import largest_difference, run
from tests.simulator import simulated
from tests.simulator.workers import SimulatedRanks

ROUNDING = 1e-5


def on_host_and_device(strategy: str, devices: int, precision: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("cpu", simulated.DEVICE):
        plan = {"parallel": {"strategy": strategy, "devices": devices, "accelerator": kind}}
        make = f"Accelerator(plan={plan}, mixed_precision={precision!r}, gradient_accumulation_steps=2)"
        result = run("classifier", 17, f"accelerator = {make}")
        assert {each.device.type for each in result["rows"]} == {kind}
        found[kind] = {name: each.cpu() for name, each in result["weights"].items()}
        found[f"rows of {kind}"] = torch.cat(result["rows"]).cpu()
    return {"races": simulated.races(), **found}


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "precision", "schedule"),
    [("single", 1, "no", "LATE"), ("single", 1, "fp16", "LATE"), ("zero3", 2, "no", "OTHERS_FIRST")],
)
def test_scripts_on_a_device(
    on_simulated: SimulatedRanks, strategy: str, num_ranks: int, precision: str, schedule: str
) -> None:
    results = on_simulated(num_ranks, on_host_and_device, strategy, num_ranks, precision, schedule=schedule)
    bound = ROUNDING if precision == "no" else 0.01  # fp16 has 11 bits
    for rank, found in enumerate(results):
        assert found["races"] == []
        if rank == 0:
            assert largest_difference(found[simulated.DEVICE], found["cpu"]) <= bound
        rows, expected = found[f"rows of {simulated.DEVICE}"], found["rows of cpu"]
        torch.testing.assert_close(rows, expected, rtol=10 * bound, atol=10 * bound)
