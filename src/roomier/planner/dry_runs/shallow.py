"""The step of a deep model, computed from dry runs of copies with fewer blocks.

The intervals of a dry run contain the bytes of all tensors. These are converted to the growth since the start of each
interval, from which :func:`roomier.planner.dry_runs.repeats.step_in_full` computes the growth in the full model. An
additional first part contains the bytes at the start of the step.

Two periods at each end of a row are run, because each end affects the adjacent period. For example, the buffers of the
last block are sent during the computation of the previous block, and no all-gather precedes the first block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from roomier.api.module import Module, network_of
from roomier.core.errors import PlanError
from roomier.plan import Plan
from roomier.planner.dry_runs.budget_estimates import TYPICAL_DEVICE
from roomier.planner.dry_runs.dry_run import DryRun, dry_run
from roomier.planner.dry_runs.repeats import NotLinearError, Repeat, find_repeats, report_full_trace, step_in_full
from roomier.planner.dry_runs.within_budget import UNIFORM, within_budget
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.hardware.machine import Device
from roomier.planner.memory.kinds import Interval, added
from roomier.planner.workload import Workload
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.budget import BudgetTooSmallError

_NUM_ENDS = 2  # number of periods at each end of a row that the copies contain
_NUM_RUN = 2 * _NUM_ENDS + 1
_LEAST = _NUM_RUN + 1  # minimum number of periods; shorter rows are run in full


def dry_run_by_depth(
    workload: Workload,
    plan: Plan,
    *,
    rank: int = 0,
    is_pairwise: bool = True,
    like: str = "cpu",
    device: Device = TYPICAL_DEVICE,
) -> DryRun:
    """Return the same result as :func:`roomier.planner.dry_runs.dry_run.dry_run`, but trace only a few blocks of a deep
    model.

    See [Note: depth] in :mod:`roomier.planner.dry_runs.repeats`. With an activation budget, the step is computed from
    three steps without a budget; see [Note: a step within a budget].

    Raises:
        RoomierError: ``build`` rejects the plan, or an activation budget is too small.
    """

    def run(traced: Workload, given: Plan = plan) -> DryRun:
        return dry_run(traced, given, rank=rank, is_pairwise=is_pairwise, like=like, device=device)

    if plan.activation.policy == "budget":
        uniform = {keep: replace(plan, activation=activation) for keep, activation in UNIFORM.items()}
    else:
        uniform = {Keep.ALL: plan}
    repeats = find_repeats(workload, uniform[Keep.ALL], least=_LEAST)
    if _saves(repeats):
        try:
            runs = {
                keep: _from_shallow_copies(workload, repeats, partial(run, given=given))
                for keep, given in uniform.items()
            }
            if plan.activation.policy != "budget":
                return runs[Keep.ALL]
            blocks = {name for name, each in network_of(workload.module).named_modules() if each in workload.blocks}
            return within_budget(plan, runs, blocks, device)
        except (PlanError, BudgetTooSmallError):
            raise
        except Exception as error:  # removing blocks can make a model raise any exception
            report_full_trace(workload.module, repeats, error)
    return run(workload)


def _saves(repeats: Sequence[Repeat]) -> bool:
    """Return whether the copies have fewer blocks in total than the model."""
    num_own = sum(_NUM_RUN * each.length for each in repeats)
    num_run = num_own * (1 + len(repeats)) - sum(each.length for each in repeats)
    return num_run < sum(each.count * each.length for each in repeats)


def _from_shallow_copies(workload: Workload, repeats: list[Repeat], trace: Callable[[Workload], DryRun]) -> DryRun:
    def run(module: Module) -> tuple[list[Interval], Mapping[WorkKey, Work]]:
        found = trace(replace(workload, module=module))
        start = Interval("", "", {}, {}, found.intervals[0].begin)
        return [start, *map(_growth, found.intervals)], found.work

    step = step_in_full(workload.module, repeats, run, num_ends=_NUM_ENDS)
    return DryRun(tuple(_intervals(step.parts)), step.work)


def _growth(interval: Interval) -> Interval:
    """Return the growth in bytes since the start of ``interval``."""
    less = added({}, interval.begin, -1)
    return interval.plus(less, less, less)


def _intervals(parts: Sequence[Interval]) -> Iterator[Interval]:
    """Convert ``parts``, whose first element contains the bytes at the start of the step, back to intervals."""
    start, *growths = parts
    level = start.end
    for growth in growths:
        interval = growth.plus(level, level, level)
        if min(count for moment in interval.moments for count in moment.values()) < 0:
            raise NotLinearError
        yield interval
        level = interval.end
