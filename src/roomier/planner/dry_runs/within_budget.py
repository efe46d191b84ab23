"""The step of a plan with an activation budget, computed from steps in which all blocks save the same activations.

[Note: a step within a budget]
Three steps are known: one in which all blocks save only their inputs, one in which they also save the results of matrix
products, and one in which they save all activations. These steps differ only in the activations that are saved between
the forward and the backward pass of each block, and in the memory of the running block, so their difference after the
forward pass of a block is the size of its activations. These sizes define the optimization problem that a run solves
after its measured step (:mod:`roomier.techniques.activation.budget_choice`). To compose the step for a solution, the
intervals of each block are taken from the step in which all blocks save the same activations as this block. The bytes
that earlier blocks save in addition are added.

A run determines the sizes differently, from one step in which all blocks save only their inputs. For equal blocks, both
methods have the same result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby

from roomier.plan import ActivationPlan, Plan
from roomier.planner.dry_runs.dry_run import DryRun
from roomier.planner.dry_runs.work import Work
from roomier.planner.fake.user_code import UnexpectedStepError
from roomier.planner.hardware.machine import Device
from roomier.planner.memory.kinds import Interval, Kind, NumBytes, added, total_bytes
from roomier.planner.timing.compute_time import recomputation_ns
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.budget import budget_bytes_of, too_small
from roomier.techniques.activation.budget_choice import SavingOption, Stage, choose, least_peak_bytes
from roomier.techniques.activation.profile import KEEPS

UNIFORM = {
    Keep.INPUT: ActivationPlan("full"),
    Keep.PRODUCTS: ActivationPlan("selective"),
    Keep.ALL: ActivationPlan(),
}
"""Settings with which all blocks save the same activations."""

_OUTSIDE = ("", "")


_NAMES = {
    Keep.ALL: "all activations",
    Keep.PRODUCTS: "the results of products",
    Keep.INPUT: "only their input",
}


def remark_of(keeps: Mapping[str, Keep]) -> str:
    """Return a sentence that describes which activations the blocks save under an activation budget; empty if there is
    no budget."""
    if not keeps:
        return ""
    counts = Counter(keeps.values())
    parts = [f"{counts[keep]} save {name}" for keep, name in _NAMES.items() if counts[keep]]
    return f"Activation budget: of {len(keeps)} blocks, {', '.join(parts)}."


class NotNestedError(UnexpectedStepError):
    """Raised if the backward passes of the blocks do not run in the reverse order of their forward passes, or if the
    order differs between the steps."""

    def __str__(self) -> str:
        return "runs its blocks in an order for which no activation budget can be computed"


def within_budget(plan: Plan, runs: Mapping[Keep, DryRun], blocks: Collection[str], device: Device) -> DryRun:
    """Return the step in which each block saves the activations that a run selects for the budget.

    Args:
        plan: plan with an activation budget.
        runs: the steps with the settings of :data:`UNIFORM`.
        blocks: names of the blocks.
        device: device whose speed determines the time of recomputation.

    Raises:
        BudgetTooSmallError: the peak exceeds the budget even if the blocks save only their inputs.
        NotNestedError: the step cannot be composed from ``runs``.
    """
    steps = {keep: _Sections(run.intervals, blocks) for keep, run in runs.items()}
    base = steps[Keep.INPUT]
    if any(each.keys != base.keys for each in steps.values()):
        raise NotNestedError
    order, alive = base.order, base.num_alive
    more = {keep: _more_bytes(each, base) for keep, each in steps.items()}

    def lost_ns(place: str, keep: Keep) -> int:
        return recomputation_ns(runs[Keep.ALL].work.get(("forward", place), Work()), keep, plan, device)

    stages = _stages(steps, more, lost_ns)
    budget_bytes = budget_bytes_of(plan.activation, stages)
    choice = choose(stages, budget_bytes)
    if choice is None:
        raise too_small(budget_bytes, least_peak_bytes(stages))
    keeps = dict(zip(order, (KEEPS[index] for index in choice[1:]), strict=True))
    more_by: list[NumBytes] = [dict.fromkeys(Kind, 0)]  # more_by[k]: bytes that the first k blocks add
    for number, keep in enumerate(keeps.values()):
        own = added(more[keep][number + 1], more[keep][number], -1)
        more_by.append(added(more_by[-1], own))
    intervals: list[Interval] = []
    for index, ((_, place), num_before) in enumerate(zip(base.keys, alive, strict=True)):
        keep = keeps.get(place, Keep.INPUT)
        change = added(more_by[num_before], more[keep][num_before], -1) if place else more_by[num_before]
        intervals += (each.plus(change, change, change) for each in steps[keep].parts[index])
    work = {part: runs[keeps.get(part[1], Keep.INPUT)].work.get(part) for run in runs.values() for part in run.work}
    return DryRun(tuple(intervals), {part: each for part, each in work.items() if each is not None}, keeps)


class _Sections:
    """Sections of a step: one for each forward or backward pass of a block, and one before, between and after them.

    Attributes:
        keys: phase and block of each section; empty strings for sections outside the blocks.
        parts: intervals of each section. Sections outside the blocks can be empty.
        order: blocks that have a backward pass, in the order of their forward passes.
        num_alive: for each section, the number of blocks whose activations are saved, without the block of the section.
    """

    def __init__(self, intervals: Sequence[Interval], blocks: Collection[str]) -> None:
        # A block without a backward pass saves no activations.
        needed = {each.place for each in intervals if each.phase == "backward" and each.place in blocks}
        self.keys = [_OUTSIDE]
        self.parts: list[list[Interval]] = [[]]
        for key, group in groupby(
            intervals, lambda each: (each.phase, each.place) if each.place in needed else _OUTSIDE
        ):
            if key == _OUTSIDE:
                self.parts[-1] += group
            else:
                self.keys += [key, _OUTSIDE]
                self.parts += [list(group), []]
        self.order = list(dict.fromkeys(place for phase, place in self.keys if phase == "forward"))
        self.num_alive: list[int] = []
        num_alive = 0
        for phase, place in self.keys:
            if phase == "backward":
                num_alive -= 1
            if place and self.order[num_alive : num_alive + 1] != [place]:
                raise NotNestedError
            self.num_alive.append(num_alive)
            if phase == "forward":
                num_alive += 1
        if num_alive:
            raise NotNestedError


def _more_bytes(step: _Sections, base: _Sections) -> list[NumBytes]:
    """Return the bytes that the first k blocks save in ``step`` in addition to ``base``, for each k."""
    found: list[NumBytes] = [dict.fromkeys(Kind, 0)]
    for index, (phase, _) in enumerate(base.keys):
        if phase == "forward" and base.num_alive[index] == len(found) - 1:  # in the first micro-batch
            found.append(added(step.parts[index][-1].end, base.parts[index][-1].end, -1))
    return found


def _stages(
    steps: Mapping[Keep, _Sections], more: Mapping[Keep, Sequence[NumBytes]], lost_ns: Callable[[str, Keep], int]
) -> Sequence[Stage]:
    base = steps[Keep.INPUT]
    outside = [0] * (len(base.order) + 1)
    own = {keep: [0] * (len(base.order) + 1) for keep in KEEPS}
    for index, ((_, place), num_before) in enumerate(zip(base.keys, base.num_alive, strict=True)):
        if not place:
            outside[num_before] = max(outside[num_before], _peak_bytes(base.parts[index]))
            continue
        for keep, step in steps.items():
            peak = _peak_bytes(step.parts[index]) - total_bytes(more[keep][num_before])
            own[keep][num_before + 1] = max(own[keep][num_before + 1], peak)
    stages = [Stage((SavingOption(0, outside[0], 0),), outside[0])]
    for number, place in enumerate(base.order, start=1):
        options = tuple(
            SavingOption(
                kept_bytes=total_bytes(more[keep][number]) - total_bytes(more[keep][number - 1]),
                own_peak_bytes=own[keep][number],
                lost_ns=lost_ns(place, keep),
            )
            for keep in KEEPS
        )
        stages.append(Stage(options, outside[number]))
    return stages


def _peak_bytes(intervals: Sequence[Interval]) -> int:
    return max((each.peak_bytes for each in intervals), default=0)
