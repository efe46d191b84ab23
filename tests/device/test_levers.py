"""Strategies and memory techniques on the simulated accelerator: numbers of the CPU, no races, no waits, forecasts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.covering import covering
from tests.device.fits import CHECKED_STEPS, compare
from tests.ranks.pool import RankFailed
from tests.simulator.workers import SimulatedRanks

LEVERS: dict[str, dict[str, Any]] = {
    "none": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by norm": {"gradient_clip_val": 0.5},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "full": {"activation_checkpointing": "full"},
    "every second": {"activation_checkpointing": "every_n"},
    "selective": {"activation_checkpointing": "selective"},
    "budget": {"activation_checkpointing": 0.5},
    "offload": {"offload": {"activations": "cpu"}},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "adamw8bit": {"optimizer": {"name": "adamw8bit", "lr": 1e-3}},
    "adamw4bit": {"optimizer": {"name": "adamw4bit", "lr": 1e-3}},
    "lion": {"optimizer": {"name": "lion", "lr": 1e-3}},
    "muon": {"optimizer": {"name": "muon", "lr": 1e-3}},
    "adafactor": {"optimizer": {"name": "adafactor", "lr": 1e-3}},
    "step in backward": {"step_in_backward": True},
    "chunked loss": {"chunked_loss": 8},
    "adapters": {"lora": {"rank": 4}},
    "quantized adapters": {"lora": {"rank": 4, "base": "nf4"}},
    "attention": {"attention": "math"},
}
# Number of ranks, and arguments of the Trainer.
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp on 2": (2, {"strategy": "ddp"}),
    "ddp on 4": (4, {"strategy": "ddp"}),
    "zero1 on 2": (2, {"strategy": "zero1"}),
    "zero2 on 4": (4, {"strategy": "zero2"}),
    "zero3 on 2": (2, {"strategy": "zero3"}),
    "zero3 on 4": (4, {"strategy": "zero3"}),
    "hsdp on 4": (4, {"strategy": {"name": "hsdp", "shard_size": 2}}),
}
# autocast uses other lists of operations on the CPU than on accelerators, so some operations compute in other dtypes.
BOUNDS = {"bf16-mixed": 2e-2, "16-mixed": 2e-2}
EXACT = 1e-6
OFFLOADED_BATCH = 16  # with smaller batches, all activations are smaller than the smallest tensor that is moved


REJECTED = {("step in backward", "ddp"), ("step in backward", "zero1")}
# torch.optim.Adafactor reads the norm of each weight. DDP arranges its buckets in its second forward. That is the third
# step, because the first step runs before DDP is created.
WAITING = {("adafactor", step) for step in CHECKED_STEPS} | {("ddp", CHECKED_STEPS[0])}


# Consecutive columns, and columns at half the distance of the list, have different strategies.
_TURNED = [*list(STRATEGIES)[3:], *list(STRATEGIES)[:3]]
SETTINGS = [(each, "LATE") for each in STRATEGIES] + [(each, "OTHERS_FIRST") for each in _TURNED]


@pytest.mark.parametrize(("lever", "setting"), covering(list(LEVERS), SETTINGS, per_row=2))
def test_technique_under_a_strategy(on_simulated: SimulatedRanks, lever: str, setting: tuple[str, str]) -> None:
    strategy, schedule = setting
    num_ranks, keywords = STRATEGIES[strategy]
    name = strategy.split()[0]
    arguments = {**keywords, **LEVERS[lever], "devices": num_ranks}
    batch_size = OFFLOADED_BATCH if lever == "offload" else 4
    if (lever, name) in REJECTED:
        with pytest.raises(RankFailed, match="PlanError"):
            on_simulated(num_ranks, compare, arguments, batch_size, schedule=schedule)
        return
    results = on_simulated(num_ranks, compare, arguments, batch_size, schedule=schedule)
    for found in results:
        assert max(found.losses, found.weights) <= BOUNDS.get(lever, EXACT)
        assert found.fit.races == []
        undocumented = [step for step in found.fit.waits if not {(lever, step), (name, step)} & WAITING]
        assert not undocumented, found.fit.waits
    peak_bytes = max(found.fit.peak_bytes for found in results)
    assert peak_bytes == pytest.approx(results[0].fit.forecast_bytes, rel=0.01)
