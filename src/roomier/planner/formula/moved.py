"""Traces of models whose blocks store their activations in host memory or on disk.

A dry run does not distinguish memory on the device and on the host, so both are calculated; see
[Note: two blocks at a time] in :mod:`roomier.techniques.activation.copies`. During the forward or backward pass of a
block, the device stores the activations of this block and the previous block. The host or the disk stores the
activations of all blocks. Tensors smaller than ``MIN_BYTES`` remain on the device.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from roomier.plan import Plan
from roomier.planner.formula.trace import Execution, Rise, Trace
from roomier.planner.hardware.machine import Machine
from roomier.techniques.activation.copies import MIN_BYTES


def leave_device(plan: Plan, machine: Machine) -> bool:
    """Return whether the activations of ``plan`` leave device memory. On a CPU, device memory is host memory, so only
    activations on disk leave it."""
    tier = plan.offload.activations
    return tier == "disk" or (tier == "cpu" and machine.device.kind != "cpu")


def moved_to_host(trace: Trace, blocks: Collection[str]) -> tuple[Trace, int]:
    """Return ``trace`` with only the memory that remains on the device, and the number of bytes outside the device at
    the end of a forward pass.

    Args:
        trace: trace with all activations on the device.
        blocks: names of the blocks whose activations are moved.
    """
    kept = trace.moved_bytes(blocks, MIN_BYTES)
    order = list(kept)
    away_at = {place: sum(kept[each] for each in order[: max(0, number - 1)]) for number, place in enumerate(order)}
    executions: list[Execution] = []
    away_bytes = 0
    for each in trace.executions:
        if each.place in away_at:
            change = away_bytes - away_at[each.place]
            away_bytes -= change
            each = _begun_with(each, Rise(activation=change))
        executions.append(each)
    return replace(trace, executions=tuple(executions)), sum(kept.values())


def _begun_with(execution: Execution, change: Rise) -> Execution:
    return replace(execution, moments=tuple(each.plus(change) for each in execution.moments))
