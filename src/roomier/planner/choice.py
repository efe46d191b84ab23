"""What the planner found: the plan it chose, those it considered, those it refused and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.planner.forecast import Forecast


@dataclass(frozen=True)
class Considered:
    """One plan that was looked at.

    Attributes:
        plan: with one strategy.
        micro_batch: samples on each rank.
        forecast: None where a rule refuses the plan.
        fits: in the budget.
        reason: why it was not chosen; empty for the chosen one.
    """

    plan: Plan
    micro_batch: int
    forecast: Forecast | None
    fits: bool
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the keys are those of :meth:`Forecast.as_dict`, ``fits`` and ``reason``."""
        known = {} if self.forecast is None else self.forecast.as_dict()
        missing = dict.fromkeys(("peak_bytes", "bytes_by_kind", "step_s"))
        return {
            "strategy": self.plan.parallel.strategy,
            "micro_batch": self.micro_batch,
            **missing,
            **known,
            "fits": self.fits,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Choice:
    """What was planned for a workload on a machine.

    Attributes:
        chosen: the fastest plan that fits, confirmed by a dry run; None where none does.
        considered: the chosen one first, then those that fit from the fastest on, then those that do not, the nearest
            first, then those that rules refuse.
        budget_bytes: what a device may hold.
        planning_s: how long it took.
    """

    machine: Machine
    budget_bytes: int
    chosen: Forecast | None
    considered: tuple[Considered, ...]
    planning_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the keys ``chosen``, ``planning_s``, ``budget_bytes``, ``plans``."""
        return {
            "chosen": None if self.chosen is None else self.chosen.as_dict(),
            "planning_s": self.planning_s,
            "budget_bytes": self.budget_bytes,
            "machine": self.machine.device.name,
            "num_ranks": self.machine.num_ranks,
            "plans": [each.as_dict() for each in self.considered],
        }
