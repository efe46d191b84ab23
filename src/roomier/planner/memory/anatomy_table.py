"""Memory of a run as plain data and as a table: bytes by kind on each rank, now and at the peak of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from roomier.core.units import format_bytes, format_count
from roomier.planner.memory.kinds import Kind

# Rows of the table, with the kinds of memory in each row.
ROWS: dict[str, tuple[Kind, ...]] = {
    "weights": (Kind.PARAMETER,),
    "gradients": (Kind.GRADIENT,),
    "optimizer_states": (Kind.OPTIMIZER_STATE,),
    "activations": (Kind.ACTIVATION,),
    "temporaries": (Kind.TEMPORARY,),
    "other": (Kind.GATHERED, Kind.COMMUNICATION),
}
STATE_ROWS = ("weights", "gradients", "optimizer_states")
NumBytes = dict[str, int]


def by_row(num_bytes: Mapping[Kind, int]) -> NumBytes:
    """Convert bytes by kind to bytes by row of the table."""
    return {row: sum(num_bytes.get(kind, 0) for kind in kinds) for row, kinds in ROWS.items()}


@dataclass(frozen=True)
class StepPeak:
    """Peak of one tracked step on this rank.

    Attributes:
        step: number of the step, counted from 1.
        phase: phase of the step at the peak, such as ``"forward"``, ``"backward"`` or ``"update"``.
        whole: bytes by row at the moment when the total size of all tensors is largest.
        states: bytes by row at the moment when the total size of weights, gradients and optimizer states is largest.
        allocator_bytes: maximum number of bytes that the device's allocator allocated; None if the allocator does not
        report it.
    """

    step: int
    phase: str
    whole: NumBytes
    states: NumBytes
    allocator_bytes: int | None = None


class KeepsPeak:
    """Base class of callbacks that track a step.

    Attributes:
        peak: peak of the last tracked step on this rank; None before the first tracked step.
    """

    peak: StepPeak | None = None


@dataclass(frozen=True)
class RankAnatomy:
    """Memory of one rank, in bytes by row of the table.

    Attributes:
        rank: number of the rank.
        now: current bytes of weights, gradients and optimizer states. Other tensors are measured only in a tracked
            step.
        rule: predicted bytes by row at the peak of the model states; None if the sizes of the optimizer states are
            unknown.
        peak: peak of a tracked step; None if no step was tracked.
        allocator: ``allocated``, ``peak`` and ``reserved`` bytes of the device's allocator; None if the allocator does
            not report them.
    """

    rank: int
    now: NumBytes
    rule: NumBytes | None
    peak: StepPeak | None = None
    allocator: NumBytes | None = None

    @property
    def worst_bytes(self) -> int:
        """Highest measured memory of this rank, in bytes."""
        peak_bytes = 0 if self.peak is None else sum(self.peak.whole.values())
        return max(sum(self.now.values()), peak_bytes, 0 if self.allocator is None else self.allocator["peak"])


@dataclass(frozen=True)
class Anatomy:
    """Memory of all ranks of a run, which is identical on every rank. ``print`` displays it as a table.

    Attributes:
        strategy: strategy and precision of the run.
        num_parameters: number of parameters of the unsharded model, including frozen parameters.
        num_trained: number of parameters that receive gradients.
        ranks: memory of each rank, in order of the ranks.
        notes: remarks on the values.
    """

    strategy: str
    num_parameters: int
    num_trained: int
    ranks: list[RankAnatomy]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> RankAnatomy:
        """The rank with the highest memory use."""
        return max(self.ranks, key=lambda each: each.worst_bytes)

    def bytes_per_parameter(self) -> dict[str, float]:
        """Return the bytes per parameter by row, for the rank with the highest memory use. If a step was tracked, the
        values are from the peak of this step; otherwise, they are current values."""
        worst = self.worst
        num_bytes = worst.now if worst.peak is None else worst.peak.states
        return {row: num_bytes[row] / self.num_parameters for row in STATE_ROWS}

    def rule_per_parameter(self) -> dict[str, float] | None:
        """Return the predicted bytes per parameter by row, for example 4 for the weight, 4 for the gradient and 8 for
        the optimizer states with AdamW in fp32 on one rank."""
        rule = self.worst.rule
        return None if rule is None else {row: rule[row] / self.num_parameters for row in STATE_ROWS}

    def as_dict(self) -> dict[str, Any]:
        """Return all values as plain data."""
        return {
            **asdict(self),
            "worst_rank": self.worst.rank,
            "bytes_per_parameter": self.bytes_per_parameter(),
            "rule_per_parameter": self.rule_per_parameter(),
        }

    def table(self) -> Table:
        """Return a table for the rank with the highest memory use, with one row per kind."""
        worst, peak = self.worst, self.worst.peak
        whose = "" if len(self.ranks) == 1 else f" of rank {worst.rank}, the largest of {len(self.ranks)} ranks"
        frozen = "" if self.num_trained == self.num_parameters else f", {format_count(self.num_trained)} trained"
        table = Table(
            title=f"memory{whose}: {format_count(self.num_parameters)} parameters{frozen}, {self.strategy}",
            caption="\n".join(self.notes) or None,
            caption_justify="left",
        )
        table.add_column("")
        for name in (
            "now",
            "peak" if peak is None else f"peak (step {peak.step}, {peak.phase})",
            "per parameter",
            "formula",
        ):
            table.add_column(name, justify="right")
        own, rule = self.bytes_per_parameter(), self.rule_per_parameter() or {}
        for row in ROWS:
            whole = None if peak is None else peak.whole[row]
            table.add_row(
                row.replace("_", " "),
                format_bytes(worst.now[row]) if row in STATE_ROWS or worst.now[row] else "",
                "" if whole is None else format_bytes(whole),
                *(f"{each[row]:.2f}" if row in each else "" for each in (own, rule)),
            )
        table.add_section()
        sums = [sum(worst.now.values()), None if peak is None else sum(peak.whole.values())]
        table.add_row(
            "total",
            *("" if each is None else format_bytes(each) for each in sums),
            *(f"{sum(each.values()):.2f}" if each else "" for each in (own, rule)),
            style="bold",
        )
        if worst.allocator is not None:
            given = worst.allocator
            table.add_row("allocator", format_bytes(given["allocated"]), format_bytes(given["peak"]))
            table.add_row("reserved", "", format_bytes(given["reserved"]))
        return table

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=120)
        console.print(self.table())
        assert isinstance(console.file, StringIO)
        return console.file.getvalue().rstrip()
