"""Distribution of a network to stages: the units at which the stages begin, and the stages that use each unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

from torch import nn

from roomier.api.blocks import open_blocks
from roomier.core.errors import PlanError
from roomier.techniques.pipeline.stage import StagePlan
from roomier.techniques.pipeline.trace import Trace
from roomier.techniques.pipeline.units import find_units

FIELD = "pipeline_parallel_size"


@dataclass(frozen=True)
class Pipeline:
    """Stages of a network, equal on all ranks.

    Attributes:
        starts: the events at which the stages after the first begin: the name of the unit, and the number of earlier
            calls of this unit in the step.
        users: for each unit, and for each parameter that glue reads, the numbers of the stages that use it.
        schedule: name of the order in which a rank runs the micro-batches of a step.
        stages_per_rank: number of stages of each rank. With ``n`` ranks, stages ``r``, ``r + n``, ``r + 2 * n`` and so
            on belong to the same rank.
    """

    starts: tuple[tuple[str, int], ...]
    users: Mapping[str, tuple[int, ...]]
    schedule: str
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.starts) + 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the stages of one replica."""
        return self.num_stages // self.stages_per_rank

    def plan_of(self, trace: Trace, stage: int) -> StagePlan:
        """Return the events of ``trace`` that ``stage`` runs. If the step does not call the units at which the stages
        begin as often as the step of the first batch, the stages begin at other units that they store.

        Raises:
            PlanError: no stages store the units in the order in which the step calls them.
        """
        names = [event.unit for event in trace.events]
        events = _calls(names)
        cuts = [0, *(events.index(start) if start in events else -1 for start in self.starts), len(events)]
        if any(a >= b for a, b in pairwise(cuts)):

            def stores(stage: int, first: int, last: int) -> bool:
                return all(stage in self.users.get(name, (self.num_stages - 1,)) for name in names[first:last])

            begins = [number for number in range(1, len(names)) if number not in trace.joined]
            cuts = [0, *_balanced([1] * len(names), begins, self.num_stages, stores), len(names)]
        if len(cuts) <= self.num_stages:
            units = ", ".join(name for name, _ in self.starts)
            problem = f"the stages begin at {units}, but a step does not call these modules in this order"
            raise PlanError(FIELD, self.num_ranks, problem, "Call the same blocks in each step, or use 'zero3'")
        return StagePlan(trace, cuts[stage], cuts[stage + 1])

    def owners(self, network: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
        """Return, for each parameter and each buffer of a unit, the first stages of the ranks that store it, in
        ascending order. Shared weights, and weights that glue reads, can be on several ranks. Unused parameters belong
        to the rank of the last stage.
        """
        num_ranks = self.num_ranks
        parameters: dict[nn.Parameter, str] = {each: name for name, each in network.named_parameters()}
        found: dict[str, set[int]] = {name: set() for name in parameters.values()}
        for name, unit in find_units(network, blocks).items():
            buffers = (each for each, _ in unit.named_buffers(name))
            names = chain((parameters[each] for each in unit.parameters()), buffers)
            for each in names:
                found.setdefault(each, set()).update(self.users.get(name, ()))
        for name in found:
            found[name].update(self.users.get(name, ()))
        of_ranks = {name: {stage % num_ranks for stage in stages} for name, stages in found.items()}
        return {name: tuple(sorted(ranks)) or (num_ranks - 1,) for name, ranks in of_ranks.items()}


def find_pipeline(
    network: nn.Module,
    blocks: Sequence[nn.Module],
    trace: Trace,
    num_stages: int,
    schedule: str,
    split: Sequence[str] = (),
    stages_per_rank: int = 1,
) -> Pipeline:
    """Divide the events of ``trace`` into stages, so that the slowest stage is as fast as possible.

    Stages begin at the first calls of the units ``split``, otherwise at blocks if the step calls enough blocks. The
    time of an event is proportional to the number of elements in the weights that it multiplies.

    Raises:
        PlanError: the step has fewer events than ``num_stages``, does not call a unit of ``split``, or calls these
            units in another order; or a BatchNorm runs on several ranks.
    """
    units = find_units(network, blocks)
    names = [event.unit for event in trace.events]
    opened = {*open_blocks(blocks)}
    separate = [number for number in range(1, len(names)) if number not in trace.joined]
    begins = [number for number in separate if units[names[number]] in opened]
    if len(begins) < num_stages - 1:
        begins = separate
    if len(begins) < num_stages - 1:
        problem = f"a step calls only {len(names)} modules with parameters ({', '.join(names)})"
        action = f"Use at most {FIELD}={len(names) // stages_per_rank}, or strategy='zero3'"
        if stages_per_rank > 1:
            problem += f", but {stages_per_rank} stages per rank require {num_stages}"
            action = f"Use at most stages_per_rank={len(names) * stages_per_rank // num_stages}"
        raise PlanError(FIELD, num_stages // stages_per_rank, problem, action)
    times = [sum(each.numel() for each in _multiplied(units[name])) for name in names]
    places = {names[number]: number for number in reversed(separate)}  # of the first calls
    if unknown := [each for each in split if each not in places]:
        problem = "is not a module at which a stage can begin"
        raise PlanError("split", unknown[0], problem, f"Use names from {[*reversed(places)]}, or remove split")
    cuts = [places[each] for each in split] or _balanced(times, begins, num_stages)
    if any(a >= b for a, b in pairwise(cuts)):
        problem = "must contain different modules in the order of their calls in a step"
        in_order = [each for each in reversed(places) if each in split]
        raise PlanError("split", ",".join(split), problem, f"Use the order {in_order}, or remove split")
    users: dict[str, set[int]] = {}
    for stage, (first, last) in enumerate(pairwise([0, *cuts, len(names)])):
        is_last = last == len(names)
        for name in names[first:last]:
            users.setdefault(name, set()).add(stage)
        for name, number in trace.weights.items():
            if number < last or is_last:
                users.setdefault(name, set()).add(stage)
    num_ranks = num_stages // stages_per_rank
    for name in units.keys() & users.keys():
        is_shared = len({stage % num_ranks for stage in users[name]}) > 1
        if is_shared and any("running_mean" in each for each, _ in units[name].named_buffers()):
            problem = f"{name} runs on several ranks, each of which would update other statistics of BatchNorm"
            raise PlanError(FIELD, num_ranks, problem, "Use GroupNorm or LayerNorm, or strategy='zero3'")
    stages = {name: tuple(sorted(found)) for name, found in users.items()}
    return Pipeline(tuple(_calls(names)[cut] for cut in cuts), stages, schedule, stages_per_rank)


def _calls(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return each name with the number of earlier occurrences of the name."""
    return [(name, names[:number].count(name)) for number, name in enumerate(names)]


def _multiplied(unit: nn.Module) -> list[nn.Parameter]:
    tables = {id(each.weight) for each in unit.modules() if isinstance(each, nn.Embedding)}
    return [each for each in unit.parameters() if each.dim() > 1 and id(each) not in tables]


def _balanced(
    times: Sequence[float],
    begins: Sequence[int],
    num_stages: int,
    stores: Callable[[int, int, int], bool] = lambda stage, first, last: True,
) -> list[int]:
    """Return the numbers in ``begins`` at which all stages but the first begin, so that the largest time of a stage is
    minimal. Return an empty list if ``stores`` returns False for a stage, its first event and the event after it."""
    before = [0, *accumulate(times)]
    ends = [*begins, len(times)]
    best: dict[int, tuple[float, list[int]]] = {end: (before[end], []) for end in ends if stores(0, 0, end)}
    for stage in range(1, num_stages):
        found = {
            end: [
                (max(slowest, before[end] - before[cut]), [*cuts, cut])
                for cut, (slowest, cuts) in best.items()
                if cut < end and stores(stage, cut, end)
            ]
            for end in ends
        }
        best = {end: min(each) for end, each in found.items() if each}
    return best.get(len(times), (0, []))[1]
