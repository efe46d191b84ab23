"""The peak of one plan for other batches: smaller or larger batches, and shorter or longer sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roomier.core.errors import RoomierError
from roomier.plan import Plan
from roomier.planner.choosing.pricing import ClosedForms, Prices
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload


@dataclass(frozen=True)
class Grid:
    """Peaks for different batch sizes and sequence lengths.

    Attributes:
        row_name: name of the quantity in the rows, such as tokens per sequence.
        rows: value of each row.
        column_name: name of the quantity in the columns, such as samples per micro-batch.
        columns: value of each column.
        peak_bytes: peak for each row and column; None if the peak is not known.
        budget_bytes: memory that a device may use.
    """

    row_name: str
    rows: Sequence[int]
    column_name: str
    columns: Sequence[int]
    peak_bytes: Sequence[Sequence[int | None]]
    budget_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "rows": {"name": self.row_name, "values": self.rows},
            "columns": {"name": self.column_name, "values": self.columns},
            "peak_bytes": self.peak_bytes,
        }


def what_if(
    workloads: Sequence[tuple[int, Callable[[], Workload]]],
    micro_batches: Sequence[int],
    plan: Plan,
    machine: Machine,
    budget_bytes: int,
    *,
    row_name: str = "tokens",
) -> Grid:
    """Return the closed-form forecast of the peak of ``plan`` on ``machine``, for each workload and micro-batch size.

    Args:
        workloads: for each row, its value and a function that returns the workload. This workload can have any
            micro-batch size.
        micro_batches: number of samples per micro-batch, for each column.
        plan: plan with a concrete strategy.
        machine: machine to plan for.
        budget_bytes: memory that a device may use.
        row_name: name of the quantity in the rows.
    """
    peaks = []
    for _, make in workloads:
        workload = make()
        prices = ClosedForms(workload, machine)

        def peak(micro_batch: int, prices: Prices = prices) -> int | None:
            try:
                return prices.estimate(plan, micro_batch).peak_bytes
            except RoomierError:
                return None  # the plan is not possible with this batch

        peaks.append([peak(each) for each in micro_batches])
    names = [name for name, _ in workloads]
    return Grid(row_name, names, "micro-batch", list(micro_batches), peaks, budget_bytes)


def around(given: int, most: int | None = None) -> list[int]:
    """Return ``given``, half of ``given``, and two and four times ``given``, in ascending order.

    Args:
        given: positive number.
        most: upper limit; larger numbers are omitted.
    """
    found = {max(given // 2, 1), given, 2 * given, 4 * given}
    return sorted(each for each in found if most is None or each <= most)
