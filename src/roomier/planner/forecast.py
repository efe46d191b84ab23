"""The cost of one plan: bytes at each point in time of a step, and the duration of the step in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from roomier.hardware.machine import Machine
from roomier.memory.kinds import Kind
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import Stretch

_SHARE_OF_HOST = 0.8  # the remaining memory is for data, its workers and the system


@dataclass(frozen=True)
class StepTime:
    """Duration of one optimizer step on one rank, in seconds.

    Attributes:
        compute_s: duration of forward and backward of all micro-batches, including recomputation.
        recompute_s: part of ``compute_s`` that is spent on recomputation.
        communication_s: duration of all collectives, including collectives that overlap with computation.
        exposed_s: part of ``communication_s`` that does not overlap with computation.
        offload_s: time that offloading of activations to the host adds to the step, including the transfers back.
        update_s: clipping and the optimizer.
    """

    compute_s: float
    recompute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    offload_s: float = 0.0
    update_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.exposed_s + self.offload_s + self.update_s


@dataclass(frozen=True)
class Forecast:
    """Cost of one plan on one machine, for the rank that requires the most memory.

    Attributes:
        plan: plan with a concrete strategy, never ``"auto"``.
        machine: machine that the forecast is for.
        micro_batch: samples of one micro-batch on each rank.
        method: ``"dry run"`` or ``"closed form"``.
        timeline: stretches of one optimizer step after the first step, in their order.
        fixed_bytes: device memory in addition to tensors, by purpose (``"context"``, ``"allocator"``, ...).
        host_bytes: bytes that one rank uses in host memory; 0 if the device is the host.
        time: duration of one step; None if it was not requested.
    """

    plan: Plan
    machine: Machine
    micro_batch: int
    method: str
    timeline: tuple[Stretch, ...]
    fixed_bytes: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int = 0
    time: StepTime | None = None

    @cached_property
    def peak(self) -> Stretch:
        """Stretch of the step with the highest total number of tensor bytes."""
        return max(self.timeline, key=lambda each: each.peak_bytes)

    @property
    def bytes_by_kind(self) -> dict[Kind, int]:
        """Tensor bytes at the peak, by kind."""
        return dict(self.peak.peak)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors at the peak."""
        return self.peak.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes used on the device at the peak, including ``fixed_bytes``."""
        return self.tensor_bytes + sum(self.fixed_bytes.values())

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch * self.plan.batch.accumulate_grad_batches * self.plan.parallel.num_ranks

    def fits(self, budget_bytes: int) -> bool:
        """Return whether the device requires at most ``budget_bytes`` and the offloaded data of a node fits in its host
        memory."""
        on_host = self.host_bytes * self.machine.devices_per_node
        return self.peak_bytes <= budget_bytes and on_host <= _SHARE_OF_HOST * self.machine.host_memory_bytes

    def _repr_html_(self) -> str:
        """Return one step of the plan as HTML, for a notebook."""
        from roomier.planner.report.page import fragment_of_forecast  # late: only notebooks show pages

        return fragment_of_forecast(self)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, without the timeline."""
        return {
            "strategy": self.plan.parallel.strategy,
            "plan": self.plan.to_dict(),
            "micro_batch": self.micro_batch,
            "method": self.method,
            "peak_bytes": self.peak_bytes,
            "peak_at": {"phase": self.peak.phase, "place": self.peak.place},
            "bytes_by_kind": {kind.value: count for kind, count in self.bytes_by_kind.items()},
            "fixed_bytes": dict(self.fixed_bytes),
            "host_bytes": self.host_bytes,
            "step_s": None if self.time is None else self.time.total_s,
            "time": None if self.time is None else asdict(self.time),
        }
