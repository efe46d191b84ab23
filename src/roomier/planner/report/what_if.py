"""Peak memory of one plan with other batch sizes and sequence lengths and, on several ranks, the longest sequences that
fit with context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from roomier.core.errors import RoomierError
from roomier.plan import Plan
from roomier.planner.choosing.candidates import with_sizes
from roomier.planner.choosing.pricing import ClosedForms, Prices
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload


@dataclass(frozen=True)
class Grid:
    """Peaks for different batch sizes and sequence lengths.

    Attributes:
        row_name: quantity in the rows, such as tokens per sequence.
        rows: value of each row.
        column_name: quantity in the columns, such as samples per micro-batch.
        columns: value of each column.
        peak_bytes: peak for each row and column; None if it is not known.
        budget_bytes: memory that a device may use.
        longest: largest sequence length that fits, by the number of ranks that share a sequence; empty if unknown.
    """

    row_name: str
    rows: Sequence[int]
    column_name: str
    columns: Sequence[int]
    peak_bytes: Sequence[Sequence[int | None]]
    budget_bytes: int
    longest: Mapping[int, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "rows": {"name": self.row_name, "values": self.rows},
            "columns": {"name": self.column_name, "values": self.columns},
            "peak_bytes": self.peak_bytes,
            "longest": {str(size): length for size, length in self.longest.items()},
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
    """Return closed-form forecasts of the peak of ``plan`` on ``machine`` for each workload and micro-batch size.

    Args:
        workloads: for each row, its value and a function that returns a workload with any micro-batch size.
        micro_batches: number of samples per micro-batch, for each column.
        plan: plan with a concrete strategy.
        machine: machine to plan for.
        budget_bytes: memory that a device may use.
        row_name: quantity in the rows.
    """
    peaks = []
    for _, make in workloads:
        prices = ClosedForms(make(), machine)

        def peak(micro_batch: int, prices: Prices = prices) -> int | None:
            with suppress(RoomierError):
                return prices.estimate(plan, micro_batch).peak_bytes
            return None  # the plan does not support this batch

        peaks.append([peak(each) for each in micro_batches])
    return Grid(row_name, [name for name, _ in workloads], "micro-batch", list(micro_batches), peaks, budget_bytes)


def longest_sequences(
    at_length: Callable[[int], Workload], given: int, most: int | None, shown: Forecast, budget_bytes: int
) -> dict[int, int]:
    """Return the largest sequence length that fits for each context size. Context sizes that the model does not
    support, or for which no length fits, are omitted.

    Args:
        at_length: function that returns the workload for a sequence length.
        given: requested sequence length.
        most: maximum sequence length of the model; None if there is no limit.
        shown: forecast of the plan, whose micro-batch size is preserved.
        budget_bytes: memory that a device may use.
    """
    plan, found = shown.plan, {}
    plain = replace(plan, parallel=replace(plan.parallel, context_parallel_size=1))
    for sized in (plain, *with_sizes(plain, "context_parallel_size", plain.parallel.devices)):

        def peak(length: int, sized: Plan = sized) -> int:
            return ClosedForms(at_length(length), shown.machine).estimate(sized, shown.micro_batch).peak_bytes

        with suppress(RoomierError):
            length = _longest(peak, given, most, budget_bytes)
            if length:
                found[sized.parallel.context_parallel_size] = length
    return found


def _longest(peak: Callable[[int], int], given: int, most: int | None, budget_bytes: int) -> int:
    """Return the largest length whose peak is within the budget, rounded down to a multiple of a sixteenth of
    ``given``; 0 if there is none.

    The peak is nearly an affine function of the length, so each step of the search extrapolates from two lengths.
    """
    unit = max(1, given // 16)
    one, two = sorted((given, 2 * given if most is None or 2 * given <= most else max(1, given // 2)))
    peaks = {length: peak(length) for length in (one, two)}
    for _ in range(4):
        slope = (peaks[two] - peaks[one]) / (two - one)
        length = one + int((budget_bytes - peaks[one]) / slope) if slope > 0 else most or 0
        length = min(length // unit * unit, most or length)
        if length < unit or length in peaks:
            break
        peaks[length] = peak(length)
        if peaks[length] <= budget_bytes:
            break
        one, two = sorted((one, length))  # the peak grows faster than linearly
    return max((length for length, each in peaks.items() if each <= budget_bytes), default=0)


def around(given: int, most: int | None = None) -> list[int]:
    """Return half of ``given``, ``given``, and two and four times ``given``.

    Args:
        given: positive number.
        most: upper limit; larger numbers are omitted.
    """
    found = {max(given // 2, 1), given, 2 * given, 4 * given}
    return sorted(each for each in found if most is None or each <= most)
