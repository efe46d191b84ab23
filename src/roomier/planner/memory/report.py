"""Predicted and measured memory of each rank, in bytes by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from roomier.api.engine import Engine
from roomier.core.ranks import Ranks
from roomier.core.units import format_bytes
from roomier.plan import Plan
from roomier.planner.memory.kinds import MODEL_STATES, Kind, total_bytes
from roomier.planner.memory.predict import predict_built
from roomier.planner.memory.tracker import MemoryTracker


@dataclass(frozen=True)
class RankReport:
    """Memory of one rank, in bytes by kind.

    Attributes:
        rank: number of the rank.
        formula: predicted model states between two steps.
        measured: current model states.
        formula_peak: predicted model states at their peak in a step.
        measured_peak: measured model states at their peak in a tracked step; None if no step was tracked.
        whole_peak: all tensors at the moment of a tracked step when their sum is largest; None if no step was tracked.
        allocator_peak_bytes: peak of the device's allocator in that step; None if the allocator does not report it.
    """

    rank: int
    formula: dict[Kind, int]
    measured: dict[Kind, int]
    formula_peak: dict[Kind, int]
    measured_peak: dict[Kind, int] | None = None
    whole_peak: dict[Kind, int] | None = None
    allocator_peak_bytes: int | None = None

    @property
    def worst_bytes(self) -> int:
        """Highest measured memory of this rank, in bytes."""
        return max(total_bytes(each or {}) for each in (self.measured, self.measured_peak, self.whole_peak))


@dataclass(frozen=True)
class MemoryReport:
    """Memory of all ranks of a run. The values are identical on every rank.

    Attributes:
        strategy: strategy of the Plan.
        ranks: memory of each rank, in order of the ranks.
    """

    strategy: str
    ranks: list[RankReport]

    @property
    def worst(self) -> RankReport:
        """The rank with the highest memory use."""
        return max(self.ranks, key=lambda each: each.worst_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return all values as plain data, with kinds as strings."""
        return {
            "strategy": self.strategy,
            "worst_rank": self.worst.rank,
            "ranks": [asdict(each) for each in self.ranks],
        }

    def table(self) -> Table:
        """Return a table for the rank with the highest memory use, with one row per kind."""
        worst = self.worst
        columns: list[tuple[str, Mapping[Kind, int]]] = [
            ("between steps, formula", worst.formula),
            ("now, measured", worst.measured),
            ("peak of model states, formula", worst.formula_peak),
        ]
        if worst.measured_peak is not None and worst.whole_peak is not None:
            columns += [("measured", worst.measured_peak), ("peak of all tensors, measured", worst.whole_peak)]
        title = f"memory of rank {worst.rank}, the largest of {len(self.ranks)} ranks; strategy {self.strategy}"
        table = Table(title=title)
        table.add_column("")
        for name, _ in columns:
            table.add_column(name, justify="right")
        for kind in Kind:
            if any(num_bytes.get(kind) for _, num_bytes in columns):
                cells = [format_bytes(num_bytes.get(kind, 0)) for _, num_bytes in columns]
                table.add_row(kind.value.replace("_", " "), *cells)
        sums = [format_bytes(total_bytes(num_bytes, MODEL_STATES)) for _, num_bytes in columns]
        table.add_row("model states", *sums, style="bold")
        return table


def report_of(engine: Engine, plan: Plan, ranks: Ranks, tracker: MemoryTracker | None = None) -> MemoryReport:
    """Return the current and the predicted memory of each rank. Every rank must call this function between two steps.

    Args:
        plan: plan from which ``engine`` was created.
        tracker: tracker that measured a step and provides the measured peaks; None if no step was measured.
    """
    engine.settle()
    with MemoryTracker(engine.module, engine.optimizers, engine.device) as look:
        pass
    rank = ranks.world.rank
    formula = predict_built(engine, plan, rank)
    own = RankReport(
        rank=rank,
        formula=formula.between_steps.num_bytes,
        measured=look.now().num_bytes,
        formula_peak=formula.peak.num_bytes,
        measured_peak=None if tracker is None else tracker.peak(MODEL_STATES).num_bytes,
        whole_peak=None if tracker is None else tracker.peak().num_bytes,
        allocator_peak_bytes=None if tracker is None else tracker.allocator_peak_bytes,
    )
    return MemoryReport(plan.parallel.strategy, ranks.gather(own))
