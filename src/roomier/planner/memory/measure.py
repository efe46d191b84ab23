"""Measurement of the memory of a Trainer's run by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roomier.core.device import memory
from roomier.core.device.capability import capabilities_of
from roomier.core.errors import RoomierError
from roomier.planner.memory.anatomy_table import Anatomy, KeepsPeak, NumBytes, RankAnatomy, StepPeak, by_row
from roomier.planner.memory.kinds import MODEL_STATES
from roomier.planner.memory.predict import predict_built
from roomier.planner.memory.tracker import MemoryTracker

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView
    from roomier.plan import Plan


def anatomy_of(trainer: TrainerView) -> Anatomy:
    """Return the memory of a run. See :func:`roomier.memory.anatomy`."""
    run = trainer.run or trainer.fitted
    if run is None:
        action = "Call anatomy() in a hook of a callback, or after trainer.fit(model, data)"
        raise RoomierError("anatomy", trainer, "has not run anything yet", action)
    engine, plan, rank = run.engine, run.plan, run.ranks.world.rank
    engine.settle()  # reshards parameters that an evaluation has unsharded
    with MemoryTracker(engine.module, engine.optimizers, engine.device) as look:
        pass
    peak = next((each.peak for each in trainer.callbacks if isinstance(each, KeepsPeak) and each.peak), None)
    notes = _notes(plan, has_peak=peak is not None)
    rule: NumBytes | None = None
    try:
        rule = by_row(predict_built(engine, plan, rank).peak.num_bytes)
    except RoomierError as error:
        notes.append(f"no formula: {error.problem}")
    own = RankAnatomy(rank, by_row(look.now().num_bytes), rule, peak, _allocator(engine.device, peak))
    parameters = list(engine.module.parameters())
    return Anatomy(
        strategy=f"{plan.parallel.strategy}, {plan.precision.mode}",
        num_parameters=sum(each.numel() for each in parameters),
        num_trained=sum(each.numel() for each in parameters if each.requires_grad),
        ranks=run.ranks.gather(own),
        notes=tuple(notes),
    )


def peak_of(tracker: MemoryTracker, step: int) -> StepPeak:
    """Return the peak of ``step`` that ``tracker`` measured."""
    whole = tracker.peak()
    states = tracker.peak(MODEL_STATES)
    return StepPeak(step, whole.phase, by_row(whole.num_bytes), by_row(states.num_bytes), tracker.allocator_peak_bytes)


def _allocator(device: torch.device, peak: StepPeak | None) -> NumBytes | None:
    if not capabilities_of(device).has_memory_statistics:
        return None
    tracked_bytes = (peak and peak.allocator_bytes) or 0  # tracking resets the peak of the allocator
    return {
        "allocated": memory.allocated_bytes(device),
        "peak": max(memory.peak_allocated_bytes(device), tracked_bytes),
        "reserved": memory.reserved_bytes(device),
    }


def _notes(plan: Plan, *, has_peak: bool) -> list[str]:
    at_peak = "bytes at the moment of a step when the sum of weights, gradients and optimizer states is largest"
    notes = [f"per parameter: {at_peak}"]
    if not has_peak:
        notes = [f"per parameter: current bytes; formula: {at_peak}"]
        notes.append("to measure the peak, add roomier.callbacks.MemoryAnatomy() to the Trainer")
    if plan.precision.mode.endswith("-mixed"):
        notes.append(
            "the often-cited 18 bytes per parameter include 2 bytes for 16-bit copies of weights, which this table "
            "counts as activations"
        )
    if plan.adapter.frozen_base != "as_is":
        notes.append("the quantized frozen base counts as bytes of weights, but not as parameters")
    if plan.compile.enabled and has_peak:
        notes.append(
            "compiled blocks ran without compilation in the tracked step; with compilation, the blocks need less memory"
        )
    return notes
