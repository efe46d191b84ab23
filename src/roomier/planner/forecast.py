"""Forecast of one plan: memory during a step, and step time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from roomier.plan import Plan
from roomier.planner.hardware.machine import Machine
from roomier.planner.memory.kinds import Interval, Kind

SHARE_OF_HOST = 0.8
"""Fraction of the host memory that may be planned. The dataset, its workers and the system use the rest."""
SHARE_OF_DISK = 0.95
"""Fraction of the free space on a disk that may be planned."""
_DAY_S = 24 * 60 * 60


@dataclass(frozen=True)
class StepTime:
    """Duration of one optimizer step on one rank, in seconds.

    Attributes:
        compute_s: duration of the forward and backward passes of all micro-batches, including recomputation.
        recompute_s: duration of recomputation, which is part of ``compute_s``.
        communication_s: duration of all collectives, including collectives that overlap with computation.
        exposed_s: part of ``communication_s`` that does not overlap with computation.
        offload_s: part of the transfers of offloaded data, in both directions, that does not overlap with computation.
        update_s: duration of gradient clipping and of the optimizer step.
        bubble_s: with a pipeline, time for which the slowest stage waits for other stages.
    """

    compute_s: float
    recompute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    offload_s: float = 0.0
    update_s: float = 0.0
    bubble_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Duration of the step in seconds."""
        return self.compute_s + self.exposed_s + self.offload_s + self.update_s + self.bubble_s


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank transfers between its device and the lower tiers in one optimizer step. Activations are
    counted only if they are offloaded to disk.

    Attributes:
        to_device_bytes: bytes copied from host memory to the device; 0 if the device is the host.
        to_host_bytes: bytes copied from the device to host memory; 0 if the device is the host.
        disk_read_bytes: bytes read from disk.
        disk_written_bytes: bytes written to disk.
    """

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{name: count + getattr(other, name) for name, count in asdict(self).items()})


@dataclass(frozen=True)
class Forecast:
    """Forecast of one plan on one machine, for the rank that requires the most memory.

    Attributes:
        plan: plan with a concrete strategy, never ``"auto"``.
        machine: machine that the forecast is for.
        micro_batch: number of samples per micro-batch on each rank.
        method: ``"dry run"`` or ``"closed form"``.
        timeline: memory during an optimizer step after the first, in execution order.
        fixed_bytes: device memory that is used in addition to tensors, by purpose (``"context"``, ``"allocator"``,
            ...).
        host_bytes: host memory that one rank uses for offloaded data (0 if the device is the host) and for the compiler
            of low-bit updates.
        time: duration of one step; None if it was not computed.
        pinned_bytes: part of ``host_bytes`` that is pinned.
        disk_bytes: bytes that one rank stores on disk.
        traffic: transfers in one step.
        remark: sentences that describe which activations the blocks save under an activation budget, why a less
            accurate method was used, or what each stage of a pipeline needs; otherwise empty.
    """

    plan: Plan
    machine: Machine
    micro_batch: int
    method: str
    timeline: tuple[Interval, ...]
    fixed_bytes: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int = 0
    time: StepTime | None = None
    pinned_bytes: int = 0
    disk_bytes: int = 0
    traffic: Traffic = Traffic()
    remark: str = ""

    @cached_property
    def peak(self) -> Interval:
        """Interval of the step with the largest total size of tensors."""
        return max(self.timeline, key=lambda each: each.peak_bytes)

    @property
    def bytes_by_kind(self) -> dict[Kind, int]:
        """Tensor bytes at the peak, by kind."""
        return dict(self.peak.peak)

    @property
    def tensor_bytes(self) -> int:
        """Total size of all tensors at the peak, in bytes."""
        return self.peak.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes used on the device at the peak, including ``fixed_bytes``."""
        return self.tensor_bytes + sum(self.fixed_bytes.values())

    @property
    def global_batch(self) -> int:
        """Number of samples per optimizer step."""
        return self.micro_batch * self.plan.batch.accumulate_grad_batches * self.plan.parallel.num_data_ranks

    @property
    def written_bytes_per_day(self) -> int | None:
        """Bytes that one rank writes to disk in 24 hours of training; None if the step time is unknown."""
        if self.time is None or not self.time.total_s:
            return None
        return round(self.traffic.disk_written_bytes * _DAY_S / self.time.total_s)

    def fits(self, budget_bytes: int) -> bool:
        """Return whether the peak on the device is at most ``budget_bytes``, and the offloaded data of each node fits
        in its host memory and on its disk."""
        return self.peak_bytes <= budget_bytes and not self.full_tier

    @property
    def full_tier(self) -> str:
        """Tier (``"host memory"`` or ``"disk"``) in which the offloaded data of a node does not fit; empty if the data
        fits."""
        machine = self.machine
        if self.host_bytes * machine.devices_per_node > SHARE_OF_HOST * machine.host_memory_bytes:
            return "host memory"
        free = machine.disk_free_bytes
        if free is not None and self.disk_bytes * machine.devices_per_node > SHARE_OF_DISK * free:
            return "disk"
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast as plain data, without the timeline."""
        return {
            "strategy": self.plan.parallel.strategy,
            "plan": self.plan.to_dict(),
            "micro_batch": self.micro_batch,
            "method": self.method,
            "remark": self.remark,
            "peak_bytes": self.peak_bytes,
            "peak_at": {"phase": self.peak.phase, "place": self.peak.place},
            "bytes_by_kind": {kind.value: count for kind, count in self.bytes_by_kind.items()},
            "fixed_bytes": dict(self.fixed_bytes),
            "host_bytes": self.host_bytes,
            "pinned_bytes": self.pinned_bytes,
            "disk_bytes": self.disk_bytes,
            "traffic": asdict(self.traffic),
            "written_bytes_per_day": self.written_bytes_per_day,
            "step_s": None if self.time is None else self.time.total_s,
            "time": None if self.time is None else asdict(self.time),
        }
