"""Result of the planner: the chosen plan, the plans that were compared, and the rejected plans with their reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roomier.core.units import format_bytes, format_seconds
from roomier.plan import Plan
from roomier.plan.levers import used_levers
from roomier.plan.parts import OffloadPlan
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.machine import Machine


@dataclass(frozen=True)
class Considered:
    """Plan that the planner evaluates, skips or rejects.

    Attributes:
        plan: plan with a concrete strategy. A rejected plan is only displayed and cannot be built. micro_batch: number
        of samples per micro-batch on each rank.
        forecast: forecast of the plan; None if the plan was rejected or not evaluated.
        fits: whether the forecast is within the budget.
        reason: reason why the plan was not chosen; empty for the chosen plan and for plans that were not evaluated yet.
        is_left_out: True if the plan was skipped, because it cannot be faster than the chosen plan or because the time
        limit was reached.
    """

    plan: Plan
    micro_batch: int
    forecast: Forecast | None = None
    fits: bool = False
    reason: str = ""
    is_left_out: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return plain data.

        The keys are ``strategy``, ``micro_batch``, the keys of :meth:`Forecast.as_dict`, ``fits`` (None if the plan was
        not evaluated) and ``reason``.
        """
        known = {} if self.forecast is None else self.forecast.as_dict()
        missing = dict.fromkeys(("peak_bytes", "bytes_by_kind", "step_s"))
        return {
            "strategy": self.plan.parallel.strategy,
            "micro_batch": self.micro_batch,
            **missing,
            **known,
            "fits": None if self.is_left_out else self.fits,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Choice:
    """Result of planning a workload on a machine.

    Attributes:
        machine: machine for which the plans were evaluated.
        budget_bytes: memory that a device may use.
        chosen: the fastest plan that fits, confirmed by a dry run if dry runs support it; None if no plan fits.
        considered: the chosen plan, followed by the plans that fit (fastest first), the plans that do not fit (smallest
        excess first), the rejected plans, and at most one plan per strategy that was not evaluated.
        planning_s: duration of the search in seconds.
        num_plans: number of compared plans, including those that ``considered`` omits, but excluding rejected plans.
        is_complete: whether the search finished before the time limit. If it did not, the skipped plans in
        ``considered`` have the time limit as their reason.
    """

    machine: Machine
    budget_bytes: int
    chosen: Forecast | None
    considered: tuple[Considered, ...]
    planning_s: float
    num_plans: int = 0
    is_complete: bool = True

    @property
    def why(self) -> str:
        """Sentence that describes the chosen plan and the reason for the choice.

        Raises:
            AssertionError: no plan fits.
        """
        chosen = self.chosen
        assert chosen is not None
        bytes_of = f"{format_bytes(chosen.peak_bytes)} of {format_bytes(self.budget_bytes)}"
        takes = "" if chosen.time is None else f", {format_seconds(chosen.time.total_s)} per step"
        how = words_of(chosen.plan, chosen.micro_batch)
        if not self.is_complete:
            rank = f"the fastest plan that fits, of the {self.num_plans} plans compared before the time limit"
        elif self.num_plans > 1:
            rank = f"the fastest plan that fits, of {self.num_plans} plans"
            others = self.considered[1:]
            if any(each.fits and _is_faster(each.forecast, chosen) for each in others):
                rank = f"the simplest of the fastest plans that fit, of {self.num_plans} plans"
            elif not any(each.fits or each.is_left_out for each in others):
                rank = f"the only plan that fits, of {self.num_plans} plans"
        else:
            rank = "the only plan for these settings"
        stages = f". {chosen.remark.rstrip('.')}" if chosen.plan.parallel.pipeline_parallel_size > 1 else ""
        return f"{how}: {rank}; forecast peak: {bytes_of} on each rank{takes}{self._why_tiers(chosen)}{stages}"

    def _why_tiers(self, chosen: Forecast) -> str:
        """Return a description of the lower tiers that the chosen plan uses and the reason for using them; empty if it
        uses none."""
        used = tiers_text(chosen)
        if not moves_states(chosen.plan):
            return f"; {used}" if used else ""
        others = [each for each in self.considered[1:] if not moves_states(each.plan)]
        if self.num_plans == 1:
            reason = ""
        elif any(each.fits for each in others):
            reason = ", which is faster than all plans that keep model states on the device"
        else:
            reason = ", because no plan that keeps model states on the device fits"
        return f"; {used}{reason}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data.

        The keys are ``chosen``, ``planning_s``, ``is_complete``, ``budget_bytes``, ``machine``, ``num_ranks`` and
        ``plans``.
        """
        return {
            "chosen": None if self.chosen is None else self.chosen.as_dict(),
            "planning_s": self.planning_s,
            "is_complete": self.is_complete,
            "budget_bytes": self.budget_bytes,
            "machine": self.machine.device.name,
            "num_ranks": self.machine.num_ranks,
            "plans": [each.as_dict() for each in self.considered],
        }


def _is_faster(one: Forecast | None, other: Forecast) -> bool:
    return one is not None and one.time is not None and other.time is not None and one.time.total_s < other.time.total_s


def moves_states(plan: Plan) -> bool:
    """Return whether ``plan`` offloads optimizer states or parameters."""
    return plan.offload.optimizer_states != "none" or plan.offload.parameters != "none"


def tiers_text(forecast: Forecast) -> str:
    """Return the host memory and disk space that one rank uses, such as ``"3.1 GiB on disk, 1.2 TiB written per day"``;
    empty if the plan does not offload."""
    parts = []
    if forecast.host_bytes:
        pinned = " (pinned)" if forecast.pinned_bytes == forecast.host_bytes else ""
        parts.append(f"{format_bytes(forecast.host_bytes)} of host memory{pinned}")
    if forecast.disk_bytes:
        parts.append(f"{format_bytes(forecast.disk_bytes)} on disk")
    if forecast.traffic.disk_written_bytes and forecast.written_bytes_per_day is not None:
        parts.append(f"{format_bytes(forecast.written_bytes_per_day)} written per day")
    return f"each rank uses {', '.join(parts)}" if parts else ""


def words_of(plan: Plan, micro_batch: int) -> str:
    """Return the settings of ``plan`` that the planner can choose, such as ``"zero2, full recompute, 2 x 4
    samples"``."""
    parallel = plan.parallel
    words = [parallel.strategy]
    if parallel.strategy == "hsdp" and parallel.shard_size is not None:
        words[0] += f" ({parallel.shard_size} ranks per replica)"
    words += levers_of(plan)
    if plan.optimizer.name is not None:
        words.append(plan.optimizer.name)
    return ", ".join([*words, f"{plan.batch.accumulate_grad_batches} x {micro_batch} samples"])


def levers_of(plan: Plan) -> list[str]:
    """Return short descriptions of the context size, the stages, the memory techniques and the precision of ``plan``.
    The precision ``"32-true"`` is omitted."""
    activation, parallel = plan.activation, plan.parallel
    words = [f"{parallel.context_parallel_size} ranks per sequence"] if parallel.context_parallel_size > 1 else []
    if parallel.pipeline_parallel_size > 1:
        words.append(f"{parallel.pipeline_parallel_size} stages, {parallel.schedule_of_stages}")
    if activation.policy != "none":
        words.append(f"{activation.policy} recompute" if activation.policy != "budget" else "recompute by budget")
    tiers = {"cpu": "in host memory", "disk": "on disk"}
    for name in ("activations", "optimizer_states", "parameters"):
        tier = getattr(plan.offload, name)
        if tier != "none":
            words.append(f"{name.replace('_', ' ')} {tiers[tier]}")
    if plan.offload.buffers != OffloadPlan.buffers:
        words.append(f"{plan.offload.buffers} buffer{'s' * (plan.offload.buffers > 1)}")
    if plan.parallel.communication != "overlapped":
        words.append(f"{plan.parallel.communication} communication")
    words += (lever.words for lever in used_levers(plan))
    if plan.precision.mode != "32-true":
        words.append(plan.precision.mode)
    return words
