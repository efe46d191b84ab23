"""What the planner found: the plan it chose, those it considered, those it refused and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roomier.core.units import format_bytes, format_seconds
from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.plan.levers import used_levers
from roomier.planner.forecast import Forecast


@dataclass(frozen=True)
class Considered:
    """One plan that was looked at.

    Attributes:
        plan: with one strategy; where a rule refuses it, a value to be shown, which no build takes.
        micro_batch: samples on each rank.
        forecast: None where the plan is refused, or was not looked at.
        fits: in the budget.
        reason: why it was not chosen; empty for the chosen one.
        is_left_out: it was not looked at, since it cannot be better than the chosen one, or time ran out.
    """

    plan: Plan
    micro_batch: int
    forecast: Forecast | None
    fits: bool
    reason: str = ""
    is_left_out: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain data; the keys are those of :meth:`Forecast.as_dict`, ``fits`` (None of what was not looked at) and
        ``reason``."""
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
    """What was planned for a workload on a machine.

    Attributes:
        chosen: the fastest plan that fits, confirmed by a dry run; None where none does.
        considered: the chosen one first, then those that fit from the fastest on, then those that do not, the nearest
            first, then those that rules refuse.
        budget_bytes: what a device may hold.
        planning_s: how long it took.
        num_plans: that were compared, those not in ``considered`` included; refused ones are not counted.
        is_complete: the search came to its end; else time ran out, and the considered say what it did not look at.
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
        """What was chosen and why, in one sentence.

        Raises:
            AssertionError: nothing fits.
        """
        chosen = self.chosen
        assert chosen is not None
        bytes_of = f"{format_bytes(chosen.peak_bytes)} of {format_bytes(self.budget_bytes)}"
        takes = "" if chosen.time is None else f", {format_seconds(chosen.time.total_s)} a step"
        how = words_of(chosen.plan, chosen.micro_batch)
        if not self.is_complete:
            rank = f"the fastest that fits of those of {self.num_plans} plans that there was time for"
        elif self.num_plans > 1:
            rank = f"the fastest that fits of {self.num_plans} plans"
            others = self.considered[1:]
            if any(each.fits and _is_faster(each.forecast, chosen) for each in others):
                rank = f"of {self.num_plans} plans the simplest of the fastest that fit"
            elif not any(each.fits or each.is_left_out for each in others):
                rank = f"the only one of {self.num_plans} plans that fits"
        else:
            rank = "the one plan that was asked for"
        return f"{how}: {rank}; forecast: {bytes_of} on each rank at the peak{takes}"

    def _repr_html_(self) -> str:
        """What was planned, for a notebook."""
        from roomier.planner.report.page import fragment_of  # late: only notebooks show pages

        return fragment_of(self)

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the keys ``chosen``, ``planning_s``, ``is_complete``, ``budget_bytes``, ``plans``."""
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


def words_of(plan: Plan, micro_batch: int) -> str:
    """What the planner may change, as it stands in ``plan``: ``"zero2, full recompute, 2 x 4 samples"``."""
    parallel = plan.parallel
    words = [parallel.strategy]
    if parallel.strategy == "hsdp" and parallel.shard_size is not None:
        words[0] += f" ({parallel.shard_size} ranks to a copy)"
    words += levers_of(plan)
    if plan.optimizer.name is not None:
        words.append(plan.optimizer.name)
    return ", ".join([*words, f"{plan.batch.accumulate_grad_batches} x {micro_batch} samples"])


def levers_of(plan: Plan) -> list[str]:
    """What ``plan`` does besides its strategy and its optimizer, in a word or two each."""
    activation = plan.activation
    words: list[str] = []
    if activation.policy != "none":
        words.append(f"{activation.policy} recompute" if activation.policy != "budget" else "recompute by budget")
    if plan.offload.activations != "none":
        words.append("activations in host memory")
    words += (lever.words for lever in used_levers(plan))
    if plan.precision.mode != "32-true":
        words.append(plan.precision.mode)
    return words
