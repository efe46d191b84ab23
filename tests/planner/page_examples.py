"""Constructed choices and records, from which tests render pages."""

from __future__ import annotations

import dataclasses
from typing import Any

from roomier.plan import plan_from_flags
from roomier.planner.choice import Choice, Considered
from roomier.planner.forecast import Forecast, StepTime
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.measured.record import ForecastRecord, TrackedRank
from roomier.planner.memory.kinds import Interval, Kind
from roomier.planner.report.what_if import Grid

GIB = 2**30
BUDGET_BYTES = 36 * GIB
NUM_BLOCKS = 12


def machine(name: str = "a100-40gb") -> Machine:
    link = Link(300e9)
    device = Device(name, "cuda", 40 * GIB, {"fp32": 19.5e12, "bf16": 312e12}, 1.555e12)
    return Machine(device, 8, 1, link, link, link, link, link, 512 * GIB, "data sheets")


def timeline(states: float, kept: float, *, gathered: float = 0.0, gradient: float = 1.0) -> tuple[Interval, ...]:
    """Return a step in which the bytes of activations increase and decrease block by block. Sizes are in GiB."""
    found: list[Interval] = []

    def held(activation: float, gradients: float, temporary: float = 0.0) -> dict[Kind, int]:
        given = {
            Kind.PARAMETER: states / 4,
            Kind.OPTIMIZER_STATE: states / 2,
            Kind.GRADIENT: gradients,
            Kind.GATHERED: gathered,
            Kind.ACTIVATION: activation,
            Kind.COMMUNICATION: 0.2 if gathered else 0.0,
            Kind.TEMPORARY: temporary,
        }
        return {kind: int(number * GIB) for kind, number in given.items()}

    def add(phase: str, place: str, begin: Any, end: Any, extra: float) -> None:
        found.append(Interval(phase, place, held(*begin), held(max(begin[0], end[0]), end[1], extra), held(*end)))

    for index in range(NUM_BLOCKS):
        add("forward", f"gpt.blocks.{index}", (kept * index, 0.0), (kept * (index + 1), 0.0), 0.5)
    add("forward", "gpt.head", (kept * NUM_BLOCKS, 0.0), (kept * NUM_BLOCKS + 1, 0.0), 1.0)
    for index in reversed(range(NUM_BLOCKS)):
        share = 1 - index / NUM_BLOCKS
        begin = (kept * (index + 1), gradient * (share - 1 / NUM_BLOCKS))
        add("backward", f"gpt.blocks.{index}", begin, (kept * index, gradient * share), 1.5)
    add("update", "", (0.0, gradient), (0.0, gradient), 0.3)
    return tuple(found)


def forecast(strategy: str, states: float, kept: float, step_s: float, **keywords: Any) -> Forecast:
    gathered = 2.0 if strategy.startswith("zero") else 0.0
    given = {"devices": 8, "optimizer": "adamw", "precision": "bf16-mixed", "accelerator": "cuda", **keywords}
    return Forecast(
        plan=plan_from_flags(strategy=strategy, **given),
        machine=machine(),
        micro_batch=4,
        method="dry run",
        timeline=timeline(states, kept, gathered=gathered),
        fixed_bytes={"context": int(0.5 * GIB), "workspace": int(0.1 * GIB)},
        time=StepTime(step_s, 0.0, 0.2 * step_s, 0.05 * step_s, 0.0, 0.02 * step_s),
    )


def choice(*, fits: bool = True, place: str = "") -> Choice:
    """Return five plans with a forecast and two rejected plans. ``place`` is inserted into a reason and may be HTML."""
    found = [
        forecast("zero2", 12.0, 1.0, 0.52),
        forecast("zero3", 8.0, 1.0, 0.61),
        forecast("zero3", 8.0, 0.2, 0.74, activation_checkpointing="full"),
        forecast("zero1", 22.0, 1.0, 0.53),
        forecast("ddp", 110.0, 1.0, 0.5),
    ]
    budget_bytes = BUDGET_BYTES if fits else 4 * GIB
    considered = [
        Considered(
            each.plan,
            4,
            each,
            each.fits(budget_bytes),
            "" if index == 0 else "slower" if each.fits(budget_bytes) else "needs more than the budget",
        )
        for index, each in enumerate(found)
    ]
    refused = plan_from_flags(strategy="ddp", devices=8, optimizer="adamw")
    considered += [Considered(refused, 2, None, False, f"BatchNorm takes statistics of each micro-batch {place}")]
    considered += [Considered(refused, 1, None, False, "the loader creates its batches itself")]
    chosen = found[0] if fits else None
    return Choice(machine(), budget_bytes, chosen, tuple(considered), 3.21)


def grid() -> Grid:
    rows, columns = (512, 1024, 2048, 4096), (1, 2, 4, 8, 16)
    peaks = [[int((8 + row * column / 800) * GIB) for column in columns] for row in rows]
    return Grid("tokens", rows, "samples", columns, [*peaks[:3], [None, *peaks[3][1:]]], BUDGET_BYTES)


def record(*, num_ranks: int = 2, allocator_bytes: int | None = None) -> ForecastRecord:
    given = forecast("zero2", 12.0, 1.0, 0.52)
    full = tuple(
        dataclasses.replace(each, peak={**each.peak, Kind.ACTIVATION: int(each.peak[Kind.ACTIVATION] * 1.04)})
        for each in given.timeline
    )
    others = [TrackedRank(rank, (given.timeline[3],), allocator_bytes) for rank in range(num_ranks - 1)]
    ranks = (*others, TrackedRank(num_ranks - 1, full, allocator_bytes))
    return ForecastRecord(given, 2, ranks, BUDGET_BYTES, "planned", ("A note.",))
