"""Offloaded optimizer states on the simulated accelerator: the same bits as with states on the device, no races, and
less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roomier.engine.offloaded_updates import OffloadedUpdates
from tests.device.fits import CHECKED_STEPS, differences, fit
from tests.offload.test_modes import MODES
from tests.offload.test_modes_on_ranks import not_supported
from tests.simulator import simulated
from tests.simulator.workers import SimulatedRanks

STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "zero2": (2, {"strategy": "zero2"}),
    "zero3": (2, {"strategy": "zero3"}),
    "hsdp": (4, {"strategy": {"name": "hsdp", "shard_size": 2}}),
}

LATE_FIRST = list(zip(STRATEGIES, 3 * ["LATE", "OTHERS_FIRST"], strict=True))
OTHERS_FIRST = list(zip(STRATEGIES, 3 * ["OTHERS_FIRST", "LATE"], strict=True))


def compare(keywords: dict[str, Any], tiers: dict[str, Any]) -> tuple[list[str], Any, int]:
    """Return problems, waits per step, and the difference between the peaks in bytes."""
    resident = fit(simulated.DEVICE, keywords, num_blocks=4, forecasts=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadedUpdates, "_be_plain", not_supported)
        offloaded = fit(simulated.DEVICE, {**keywords, "offload": tiers}, num_blocks=4, forecasts=False)
    problems = list(offloaded.races)
    if differences(resident, offloaded) != (0, 0):
        problems.append(f"differences {differences(resident, offloaded)}")
    return problems, offloaded.waits, resident.peak_bytes - offloaded.peak_bytes


def calls_of(strategy: str, folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return all combinations of tiers, modes and clipping as arguments of :func:`compare`."""
    num_ranks, keywords = STRATEGIES[strategy]
    return [
        (
            {**keywords, "devices": num_ranks, "gradient_clip_val": clip},
            {"optimizer_states": tier, "update": mode, **({"folder": str(folder)} if tier == "disk" else {})},
        )
        for tier in ("cpu", "disk")
        for mode in MODES
        for clip in (None, 0.5)
        if (strategy, mode) != ("ddp", "speculative")
    ]


def unexpected_waits(strategy: str, tier: str, mode: str, clip: float | None, waits: Any) -> dict[int, dict[str, int]]:
    """Return the waits of the host that the design does not include.

    The writer thread of a disk tier waits for copies. A speculative update reads the clipping factor. DDP arranges its
    buckets in the third step.
    """
    allowed = {"event.synchronize"} if tier == "disk" else set()
    allowed |= {"item"} if mode == "speculative" and clip is not None else set()
    found = {step: {kind: num for kind, num in kinds.items() if kind not in allowed} for step, kinds in waits.items()}
    return {step: kinds for step, kinds in found.items() if kinds and (strategy, step) != ("ddp", CHECKED_STEPS[0])}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("strategy", "schedule"), LATE_FIRST)
def test_states_in_every_mode(
    on_simulated: SimulatedRanks, strategy: str, schedule: str, every: bool, tmp_path: Path
) -> None:
    calls = calls_of(strategy, tmp_path)
    if not every:  # each strategy selects different calls
        calls = [calls[5 * list(STRATEGIES).index(strategy) % len(calls)]]
    results = on_simulated.each(STRATEGIES[strategy][0], compare, calls, schedule=schedule, timeout_s=600.0)
    for (keywords, tiers), by_rank in zip(calls, results, strict=True):
        for problems, waits, saved_bytes in by_rank:
            assert not problems[:3], tiers
            given = tiers["optimizer_states"], tiers["update"], keywords["gradient_clip_val"]
            assert not unexpected_waits(strategy, *given, waits), tiers
            # Speculative records contain weights, and deferred updates retain the earlier buckets of DDP.
            if tiers["update"] != "speculative" and strategy != "ddp":
                assert saved_bytes > 0, tiers


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "schedule"), OTHERS_FIRST)
def test_states_under_the_other_schedule(
    on_simulated: SimulatedRanks, strategy: str, schedule: str, tmp_path: Path
) -> None:
    test_states_in_every_mode(on_simulated, strategy, schedule, True, tmp_path)
