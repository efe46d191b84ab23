"""The peak of one plan for other batches: smaller and larger ones, shorter and longer sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roomier.core.errors import RoomierError
from roomier.hardware.machine import Machine
from roomier.plan import Plan
from roomier.planner.choosing.pricing import Prices, prices_of
from roomier.planner.report.grids import Grid
from roomier.planner.workload import Workload

__all__ = ["Grid", "around", "what_if"]


def what_if(
    workloads: Sequence[tuple[int, Callable[[], Workload]]],
    micro_batches: Sequence[int],
    plan: Plan,
    machine: Machine,
    budget_bytes: int,
    *,
    row_name: str = "tokens",
) -> Grid:
    """The peak of ``plan`` on ``machine`` by closed form.

    Args:
        workloads: a row each: what it is called, and how the workload is made, with any micro-batch.
        micro_batches: a column each, in samples.
    """
    peaks = []
    for _, make in workloads:
        workload = make()
        prices = prices_of(workload, machine)

        def peak(micro_batch: int, prices: Prices = prices) -> int | None:
            try:
                return prices.estimate(plan, micro_batch).peak_bytes
            except RoomierError:
                return None  # this plan cannot be for that batch

        peaks.append([peak(each) for each in micro_batches])
    names = [name for name, _ in workloads]
    return Grid(row_name, names, "micro-batch", list(micro_batches), peaks, budget_bytes)


def around(given: int, most: int | None = None) -> list[int]:
    """``given`` with what is half, twice and four times as much.

    Args:
        most: what is more is left out.
    """
    found = {max(given // 2, 1), given, 2 * given, 4 * given}
    return sorted(each for each in found if most is None or each <= most)
