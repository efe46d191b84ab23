"""Estimates for an activation budget in a dry run, which replace the measurements of a run. Bytes are computed from
shapes, and times from a performance model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from roomier.plan import Plan
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.hardware.machine import Device
from roomier.planner.memory.tracker import MemoryTracker
from roomier.planner.timing.compute_time import recomputation_ns
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.live_bytes import CountedBytes, LiveBytes

TYPICAL_DEVICE = Device(
    "typical CPU",
    "cpu",
    memory_bytes=2**36,
    flops_per_s=dict.fromkeys(("fp64", "fp32", "tf32", "bf16", "fp16", "fp8"), 1e11),
    memory_bytes_per_s=2e10,
    operation_s=3e-6,
)
"""Device whose speed is assumed if a dry run is not for a specific machine. The speed only affects which activations
each block saves. The values are assumptions."""


@dataclass(frozen=True)
class DryEstimates:
    """Implementation of :class:`roomier.techniques.activation.budget.Estimates` for a dry run.

    Args:
        tracker: tracker of the dry run.
        work: work of the measured step, by phase and part of the model.
        blocks: names of the blocks, in the order of the network.
        plan: plan of the dry run.
        device: device on which the model runs.
        like: type of the device that the fake tensors represent. On a CPU, a run counts only storages that operations
            use. On all other devices, the allocator also reports unused tensors and the memory of the update.
    """

    tracker: MemoryTracker
    work: Mapping[WorkKey, Work]
    blocks: Sequence[str]
    plan: Plan
    device: Device
    like: str

    def live_bytes(self) -> LiveBytes:
        """Return a counter of the bytes in use."""
        return CountedBytes(torch.device("cpu")) if self.like == "cpu" else TrackedBytes(self.tracker)

    def lost_ns(self, block: int, keep: Keep) -> int:
        """Return the time that recomputing a block adds to a step, in nanoseconds."""
        forward = self.work.get(("forward", self.blocks[block]), Work())
        return recomputation_ns(forward, keep, self.plan, self.device)


class TrackedBytes(LiveBytes):
    """Bytes in use according to a memory tracker, as a substitute for the statistics of an allocator. Like the
    allocator, it includes all tensors of the optimizer and the memory of the update.

    Args:
        tracker: active tracker, which must not be restarted while this object is in use.
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._num_seen = 0
        self._before = 0  # change in bytes before the start
        self._level = 0
        self._peak = 0

    @property
    def base_bytes(self) -> int:  # type: ignore[override]  # grows while the tracker finds older tensors
        """Bytes that were in use before the start."""
        return self._tracker.bytes_at_start() + self._before

    def start(self) -> None:
        """Start the measurement."""
        changes = self._tracker.changes_since(0)
        self._num_seen, self._before = len(changes), sum(changes)

    def level(self) -> int:
        """Return the bytes in use in addition to :attr:`base_bytes`."""
        changes = self._tracker.changes_since(self._num_seen)
        self._num_seen += len(changes)
        for num_bytes in changes:
            self._level += num_bytes
            self._peak = max(self._peak, self._level)
        return self._level

    def take_peak(self) -> int:
        """Return the peak since the previous call."""
        level = self.level()
        peak, self._peak = self._peak, level
        return peak
