"""Strategies and memory techniques on the simulated accelerator: the same numbers as on the CPU, no races, no waits,
and forecasts."""

from __future__ import annotations

from typing import Any

import pytest

from roomier.core.errors import RoomierError
from tests.device.fits import CHECKED_STEPS, Comparison, compare, differences, fit
from tests.simulator import simulated
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
    "disk": {"offload": {"activations": "disk"}},
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
# With smaller batches, all activations are smaller than the smallest tensor that is moved. With fewer than three
# blocks, no activation leaves the device.
SIZES = {lever: {"batch_size": 16, "num_blocks": 4} for lever in ("offload", "disk")}
_SHARDED = ("zero1", "zero2", "zero3", "hsdp")
REJECTED = {
    *(("step in backward", name) for name in ("ddp", "zero1")),
    *(("quantized adapters", name) for name in _SHARDED),
}
# torch.optim.Adafactor reads the norm of each weight. DDP arranges its buckets in its second forward. That is the third
# step, because the first step runs before DDP is created. The writer thread of a disk waits for copies to the host.
WAITING = {(lever, step) for lever in ("adafactor", "disk") for step in CHECKED_STEPS} | {("ddp", CHECKED_STEPS[0])}
# The CPU sums shards in the order of the ranks, but the collectives of the accelerator use a different order.
REORDERED = ("zero2 on 4", "zero3 on 4")
QUANTIZED = ("adamw8bit", "adamw4bit", "lion", "muon")
SETTINGS = [(strategy, schedule) for schedule in ("LATE", "OTHERS_FIRST") for strategy in STRATEGIES]


def selections() -> list[Any]:
    """Return each strategy and schedule with one or two of the levers, and as slow tests with all other levers.

    Each lever is selected once. The factor and the offset of its setting are chosen such that the levers that move
    memory are selected with sharded strategies, and no selected combination is rejected.
    """
    params = []
    for index, setting in enumerate(SETTINGS):
        name = " on ".join(setting)
        selected = [lever for i, lever in enumerate(LEVERS) if index == (9 * i + 5) % len(SETTINGS)]
        others = [lever for lever in LEVERS if lever not in selected]
        params.append(pytest.param(*setting, selected, id=name))
        params.append(pytest.param(*setting, others, id=f"{name} with other levers", marks=pytest.mark.slow))
    return params


@pytest.mark.parametrize(("strategy", "schedule", "levers"), selections())
def test_levers_under_a_strategy(on_simulated: SimulatedRanks, strategy: str, schedule: str, levers: list[str]) -> None:
    num_ranks, keywords = STRATEGIES[strategy]
    calls = [
        (
            {**keywords, **LEVERS[lever], "devices": num_ranks},
            SIZES.get(lever, {}),
            (lever, strategy.split()[0]) in REJECTED,
        )
        for lever in levers
    ]
    # On processors without bf16 instructions, the updates of Muon on four ranks and two cores take minutes.
    by_lever = on_simulated.each(num_ranks, compare, calls, schedule=schedule, timeout_s=120.0 + 120.0 * len(calls))
    problems = [
        f"{lever}: {problem}"
        for lever, results in zip(levers, by_lever, strict=True)
        for problem in (problems_of(lever, strategy, results) if results[0] is not None else [])
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("strategy", ["zero3 on 2", "hsdp on 4"])
def test_sequential_communication(on_simulated: SimulatedRanks, strategy: str) -> None:
    num_ranks, keywords = STRATEGIES[strategy]
    settings = keywords["strategy"] if isinstance(keywords["strategy"], dict) else {"name": keywords["strategy"]}
    sequential = {"strategy": {**settings, "communication": "sequential"}, "devices": num_ranks}
    results = on_simulated(num_ranks, compare, sequential, {}, False, schedule="OTHERS_FIRST")
    assert problems_of("none", strategy, results) == []


def problems_of(lever: str, strategy: str, results: list[Comparison]) -> list[str]:
    """Return the expectations that the results of the ranks do not satisfy."""
    found = []
    loss_bound, weight_bound = bounds_of(lever, strategy)
    for rank, each in enumerate(results):
        if each.losses > loss_bound or each.weights > weight_bound:
            found.append(f"rank {rank}: loss differs by {each.losses:.1e}, weight by {each.weights:.1e}")
        found += [f"rank {rank}: {race}" for race in each.fit.races]
        found += [
            f"rank {rank}: waits in step {step}: {waits}"
            for step, waits in each.fit.waits.items()
            if not {(lever, step), (strategy.split()[0], step)} & WAITING
        ]
    peak_bytes = max(each.fit.peak_bytes for each in results)
    forecast = results[0].fit
    # A budget is an upper bound. The choice for each block depends on measured times, and two blocks have few possible
    # choices.
    least_bytes = forecast.least_bytes or forecast.forecast_bytes
    if not least_bytes * 0.99 <= peak_bytes <= forecast.forecast_bytes * 1.01:
        found.append(f"peak {peak_bytes} bytes, forecast {least_bytes} to {forecast.forecast_bytes} bytes")
    return found


def bounds_of(lever: str, strategy: str) -> tuple[float, float]:
    """Return the bounds of the relative differences of losses and weights."""
    if lever in ("bf16-mixed", "16-mixed"):
        # autocast uses different lists of operations on a CPU and on accelerators, so some operations round to 16 bits
        # only on one of these devices.
        return 2e-2, 2e-2
    if strategy not in REORDERED:
        return 0.0, 0.0
    # Two sums of four numbers in different orders differ by at most 2 * 3 roundings of 2**-24, relative to the sum of
    # the absolute values. AdamW multiplies a difference of gradients by at most lr / eps = 3 in each of 5 steps. The
    # gradients are smaller than the largest weight of their tensor.
    bound = 2 * 3 * 2**-24 * 3 * 5
    if lever in QUANTIZED:
        # A different rounding can change the code of a state. The update of this weight then differs by up to its size,
        # which is lr. Weights are up to 1 / sqrt(256). Muon orthogonalizes in bfloat16, which also rounds differently.
        return 1e-5, 5 * 1e-3 * 256**0.5
    if lever == "adafactor":
        # The update divides a gradient by its root mean square, without an eps. The direction of a gradient that is
        # zero except for rounding is random, and changes a weight by up to 2 * lr times the RMS of its tensor per step.
        return 1e-6, 5 * 2 * 1e-3
    return 1e-6, bound


def dropout_fits(keywords: dict[str, Any]) -> tuple[tuple[float, float], tuple[float, float], list[str]]:
    """Return the differences that recomputation and dropout cause, and the races."""
    saved = fit(simulated.DEVICE, keywords, dropout=0.2)
    recomputed = fit(simulated.DEVICE, {**keywords, "activation_checkpointing": "full"}, dropout=0.2)
    without = fit(simulated.DEVICE, keywords)
    return differences(saved, recomputed), differences(saved, without), [*saved.races, *recomputed.races]


@pytest.mark.parametrize("strategy", ["single", "zero3 on 2"])
def test_recomputation_draws_the_same_dropout_masks(on_simulated: SimulatedRanks, strategy: str) -> None:
    num_ranks, keywords = STRATEGIES[strategy]
    results = on_simulated(num_ranks, dropout_fits, {**keywords, "devices": num_ranks}, schedule="OTHERS_FIRST")
    for recomputed, without, races in results:
        assert recomputed == (0, 0)
        assert min(without) > 1e-3
        assert races == []


def event_fits(keywords: dict[str, Any]) -> tuple[list[tuple[float, float]], list[Any]]:
    """Return the differences that recomputation, offloading and another seed cause with events, and races and waits."""
    sizes: dict[str, Any] = {"dropout": 0.2, "batch_size": 16, "num_blocks": 4, "forecasts": False}
    keywords = {**keywords, "seeding": "events"}
    changes = {}, {"activation_checkpointing": "full"}, {"offload": {"activations": "cpu"}}
    saved, *others = (fit(simulated.DEVICE, {**keywords, **change}, **sizes) for change in changes)
    with simulated.allowed_host_waits():
        on_cpu = fit("cpu", keywords, **sizes)
    unusual = [each for one in (saved, *others) for each in (*one.races, *one.waits.items())]
    return [differences(saved, other) for other in (*others, on_cpu)], unusual


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["single", "zero3 on 2"])
def test_events_draw_the_same_dropout_masks_without_waits(on_simulated: SimulatedRanks, strategy: str) -> None:
    num_ranks, keywords = STRATEGIES[strategy]
    results = on_simulated(num_ranks, event_fits, {**keywords, "devices": num_ranks}, schedule="OTHERS_FIRST")
    for (recomputed, offloaded, on_cpu), unusual in results:
        assert recomputed == offloaded == (0, 0)
        assert min(on_cpu) > 1e-3  # a device draws other numbers than the CPU
        assert unusual == []


def fit_compiled() -> None:
    with pytest.raises(RoomierError, match=r"torch\.compile requires a code generator for simulated"):
        fit(simulated.DEVICE, {"compile": True})


def test_compile_is_rejected_on_a_device_without_a_code_generator(on_simulated: SimulatedRanks) -> None:
    on_simulated(1, fit_compiled)
