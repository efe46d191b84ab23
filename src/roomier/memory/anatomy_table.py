"""The anatomy of a run's memory as a value: bytes by kind on each rank, now and at the peak of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from roomier.core.units import format_bytes, format_count
from roomier.memory.kinds import Kind

# Rows of the table, with what is in them.
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
    """Bytes by kind as bytes by row."""
    return {row: sum(num_bytes.get(kind, 0) for kind in kinds) for row, kinds in ROWS.items()}


@dataclass(frozen=True)
class StepPeak:
    """One step that was tracked on this rank.

    Attributes:
        step: its number, from 1.
        phase: of the step, at the peak: ``"forward"``, ``"backward"``, ``"update"``.
        whole: all tensors when they together are largest.
        states: the same when weights, gradients and optimizer states together are largest.
        allocator_bytes: the most that CUDA's allocator had given out; None on other devices.
    """

    step: int
    phase: str
    whole: NumBytes
    states: NumBytes
    allocator_bytes: int | None = None


class KeepsPeak:
    """A callback that tracks a step.

    Attributes:
        peak: of the last step it tracked on this rank; None before.
    """

    peak: StepPeak | None = None


@dataclass(frozen=True)
class RankAnatomy:
    """One rank, in bytes by row of the table.

    Attributes:
        now: weights, gradients and optimizer states that are there; other tensors are known in a tracked step only.
        rule: the same at their peak in a step, by the formula of the Plan; None where the optimizer's is not known.
        peak: of a step that was tracked; None where none was.
        allocator: CUDA's ``allocated``, ``peak`` and ``reserved`` bytes; None on other devices.
    """

    rank: int
    now: NumBytes
    rule: NumBytes | None
    peak: StepPeak | None = None
    allocator: NumBytes | None = None

    @property
    def worst_bytes(self) -> int:
        """What this rank needs, as far as it is known."""
        known = [sum(self.now.values())]
        if self.peak is not None:
            known.append(sum(self.peak.whole.values()))
        if self.allocator is not None:
            known.append(self.allocator["peak"])
        return max(known)


@dataclass(frozen=True)
class Anatomy:
    """All ranks of a run, the same object on each. ``print`` it.

    Attributes:
        num_parameters: of the whole model, frozen ones as well.
        num_trained: of them, those that get gradients.
        ranks: by rank.
        notes: what to know of the figures.
    """

    strategy: str
    num_parameters: int
    num_trained: int
    ranks: list[RankAnatomy]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> RankAnatomy:
        """The rank that needs the most."""
        return max(self.ranks, key=lambda each: each.worst_bytes)

    def bytes_per_parameter(self) -> dict[str, float]:
        """Of the worst rank, by row: at the peak of a tracked step's weights, gradients and states, else now."""
        worst = self.worst
        num_bytes = worst.now if worst.peak is None else worst.peak.states
        return {row: num_bytes[row] / self.num_parameters for row in STATE_ROWS}

    def rule_per_parameter(self) -> dict[str, float] | None:
        """What the formula of the Plan says they are; fp32 AdamW in one process has 4, 4 and 8."""
        rule = self.worst.rule
        return None if rule is None else {row: rule[row] / self.num_parameters for row in STATE_ROWS}

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **asdict(self),
            "worst_rank": self.worst.rank,
            "bytes_per_parameter": self.bytes_per_parameter(),
            "rule_per_parameter": self.rule_per_parameter(),
        }

    def table(self) -> Table:
        """The worst rank: a row for each kind."""
        worst, peak = self.worst, self.worst.peak
        whose = "" if len(self.ranks) == 1 else f" of rank {worst.rank}, the fullest of {len(self.ranks)}"
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
            "by rule",
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
            "together",
            *("" if each is None else format_bytes(each) for each in sums),
            *(f"{sum(each.values()):.2f}" if each else "" for each in (own, rule)),
            style="bold",
        )
        if worst.allocator is not None:
            given = worst.allocator
            table.add_row("CUDA's allocator", format_bytes(given["allocated"]), format_bytes(given["peak"]))
            table.add_row("reserved by it", "", format_bytes(given["reserved"]))
        return table

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=120)
        console.print(self.table())
        assert isinstance(console.file, StringIO)
        return console.file.getvalue().rstrip()
