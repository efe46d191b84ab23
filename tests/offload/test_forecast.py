"""Forecasts of offloaded optimizer states, compared with the tier of a run."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import roomier
from roomier.api.adapt import as_module
from roomier.callbacks import MemoryForecast
from roomier.engine.offloaded_updates import OffloadedUpdates
from roomier.engine.prepared import PreparedEngine
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan, plan_from_flags
from roomier.planner.forecast import Forecast, Traffic
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.workload import Workload
from roomier.techniques.tiers.disk import DiskTier
from tests.covering import few
from tests.device.fits import fit
from tests.ranks.pool import RankPool
from tests.simulator import simulated
from tests.simulator.workers import SimulatedRanks

CONFIG = GPTConfig(vocab_size=61, context=8, num_layers=6, num_heads=2, width=48, dropout=0.0)
NUM_STEPS = 2
LINK = Link(1e9)
Use = tuple[int, int, Traffic]

CASES: dict[str, dict[str, Any]] = {
    "auto": {},
    "one buffer": {"update": "speculative", "buffers": 1},
    "half of the states": {"update": "deferred", "share": 0.5},
    "clipped": {"update": "deferred", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    "two optimizers in one": {"optimizer": "muon"},
    "plain": {"update": "plain"},
    "deferred": {"update": "deferred"},
    "speculative": {"update": "speculative"},
    "momentum": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "8-bit states": {"optimizer": "adamw8bit"},
    "factored states": {"optimizer": "adafactor"},
}


def plan_of(folder: str | None = None, **settings: Any) -> Plan:
    tiers = {name: settings.pop(name) for name in ("update", "share", "buffers") if name in settings}
    offload = {"optimizer_states": "disk", "folder": folder, **tiers}
    return plan_from_flags(**{"accelerator": "cpu", "optimizer": "adamw", "offload": offload, **settings})


def forecast_of(plan: Plan, num_ranks: int = 1, kind: str = "cpu") -> Forecast:
    rates = dict.fromkeys(("fp32", "bf16", "fp16"), 1e12)
    machine = Machine(
        Device("any", kind, 80 * 2**30, rates, 1e12), num_ranks, 1, LINK, LINK, LINK, LINK, LINK, 2**40, ""
    )
    with torch.device("meta"):
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        module = as_module(GPT(CONFIG))
    return Estimator(Workload(module, (tokens, tokens), 2), machine).estimate(plan, 2)


def train_steps(engine: PreparedEngine, network: GPT, tier: Any, num_micro_batches: int) -> tuple[int, int]:
    """Train, and return the bytes that one step reads from the tier and writes to it."""
    tokens = torch.randint(61, (2, 9))

    def train(num_steps: int) -> tuple[int, int]:
        for _ in range(num_steps):
            batches = [tokens] * num_micro_batches
            engine.forward_backward(lambda batch: network(batch[:, :-1], batch[:, 1:])[1], batches)
            engine.clip()
            engine.step()
        engine.settle()
        return tier.bytes_read, tier.bytes_written

    before, after = train(2), train(NUM_STEPS)
    return (after[0] - before[0]) // NUM_STEPS, (after[1] - before[1]) // NUM_STEPS


def use_of_a_step(settings: dict[str, Any]) -> Use:
    """Train, and return the bytes on disk, the bytes of the buffers, and the traffic of one step."""
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(folder, **settings)
        torch.manual_seed(0)
        network = GPT(CONFIG)
        engine = roomier.prepare(network, None, plan=plan)
        updates = engine._updates
        assert isinstance(updates, OffloadedUpdates)
        tier: Any = updates._states._staging._tier
        assert isinstance(tier, DiskTier)
        read, written = train_steps(engine, network, tier, plan.batch.accumulate_grad_batches)
        use = tier.disk_bytes, tier.host_bytes, Traffic(disk_read_bytes=read, disk_written_bytes=written)
        engine.close()
        return use


@pytest.mark.parametrize("name", few(CASES, 5))
def test_bytes_and_traffic_of_one_process(name: str) -> None:
    forecast = forecast_of(plan_of(**CASES[name]))
    disk_bytes, _, traffic = use_of_a_step(CASES[name])
    assert (forecast.disk_bytes, forecast.traffic) == (disk_bytes, traffic)
    assert forecast.host_bytes == 0  # the buffers are in the memory of the device
    assert traffic.disk_written_bytes > 0


@pytest.mark.parametrize(
    "updates",
    [
        {"zero2": "speculative", "zero3": "deferred"},
        pytest.param({"ddp": "plain", "zero1": "deferred"}, marks=pytest.mark.more),
        pytest.param({"ddp": "deferred", "zero2": "plain", "zero3": "plain"}, marks=pytest.mark.more),
    ],
    ids=str,
)
def test_bytes_and_traffic_of_every_strategy(on_ranks: RankPool, updates: dict[str, str]) -> None:
    cases = [{"strategy": strategy, "devices": 2, "update": mode} for strategy, mode in updates.items()]
    for settings, by_rank in zip(cases, on_ranks.each(2, use_of_a_step, [(case,) for case in cases]), strict=True):
        forecast = forecast_of(plan_of(**settings), num_ranks=2)
        disk_bytes, _, traffic = max(by_rank, key=lambda each: each[0])
        assert (forecast.disk_bytes, forecast.traffic) == (disk_bytes, traffic), settings


@pytest.mark.parametrize(
    "settings",
    few([{"parameters": "disk"}, {"share": 0.5}, {"update": "deferred"}, {"parameters": "disk", "update": "plain"}]),
    ids=str,
)
def test_the_forecast_of_a_run_is_measured(settings: dict[str, Any], tmp_path: Path) -> None:
    class Language(roomier.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = GPT(replace(CONFIG, width=256))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.network(batch[:, :-1], batch[:, 1:])[1]

    callback = MemoryForecast(at_step=4)
    trainer = roomier.Trainer(
        accelerator="cpu",
        optimizer="adamw",
        offload={"optimizer_states": "disk", "folder": tmp_path, **settings},
        max_steps=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    )
    trainer.fit(Language(), [torch.arange(27).view(3, 9)] * 8)
    assert callback.record is not None
    assert abs(callback.record.error) < 0.01
    assert callback.record.forecast.disk_bytes > 0


def test_buffers_and_host_memory_of_an_accelerator() -> None:
    resident = forecast_of(plan_from_flags(accelerator="cuda", optimizer="adamw"), kind="cuda")
    for tier in ("cpu", "disk"):
        offload = {"optimizer_states": tier, "update": "plain"}
        found = forecast_of(plan_from_flags(accelerator="cuda", optimizer="adamw", offload=offload), kind="cuda")
        assert found.tensor_bytes < resident.tensor_bytes
        assert found.host_bytes == found.pinned_bytes > 0
        assert found.traffic.to_device_bytes <= found.traffic.to_host_bytes  # records have unused space at their ends
        assert (found.disk_bytes > 0) == (tier == "disk")


@pytest.mark.parametrize("settings", [{}, {"update": "plain", "accumulate_grad_batches": 3}], ids=str)
def test_bytes_and_traffic_of_parameters(settings: dict[str, Any], tmp_path: Path) -> None:
    tiers = {"parameters": "disk", "folder": str(tmp_path), "update": settings.get("update", "auto")}
    rest = {name: value for name, value in settings.items() if name != "update"}
    plan = plan_from_flags(accelerator="cpu", optimizer="adamw", offload=tiers, **rest)
    network = GPT(CONFIG)
    engine = roomier.prepare(network, None, plan=plan)
    updates = engine._updates
    assert isinstance(updates, OffloadedUpdates)
    tier: Any = updates.parameters._residency._tier  # type: ignore[attr-defined]
    read, written = train_steps(engine, network, tier, plan.batch.accumulate_grad_batches)
    forecast = forecast_of(plan)
    assert (forecast.disk_bytes, forecast.traffic.disk_written_bytes) == (tier.disk_bytes, written)
    # the data that was read for an expected region can be discarded
    assert read / 1.3 < forecast.traffic.disk_read_bytes < 1.3 * read
    engine.close()


def peaks(keywords: dict[str, Any]) -> tuple[int, int]:
    """Return the forecast of the peak on the simulated accelerator, and the measured peak."""
    found = fit(simulated.DEVICE, keywords, num_blocks=8)
    return found.forecast_bytes, found.peak_bytes


@pytest.mark.parametrize(
    "strategy",
    ["single", "ddp", pytest.param("zero2", marks=pytest.mark.more), pytest.param("zero3", marks=pytest.mark.more)],
)
def test_peak_of_an_accelerator(on_simulated: SimulatedRanks, strategy: str) -> None:
    num_ranks = 1 if strategy == "single" else 2
    tiers = [{"optimizer_states": "cpu", "update": mode} for mode in ("plain", "deferred", "speculative")]
    if strategy == "ddp":
        del tiers[2]
    if strategy in ("single", "zero3"):
        tiers += [{**each, "parameters": "cpu"} for each in tiers[:2]] + [{"parameters": "cpu"}]
    calls = [({"strategy": strategy, "devices": num_ranks, "offload": each},) for each in tiers]
    results = on_simulated.each(num_ranks, peaks, calls, timeout_s=300.0)
    for [keywords], by_rank in zip(calls, results, strict=True):
        forecast_bytes, peak_bytes = max(forecast for forecast, _ in by_rank), max(peak for _, peak in by_rank)
        assert forecast_bytes == pytest.approx(peak_bytes, rel=0.01), keywords
