"""Detection of equal blocks in a deep model, and copies of the model with fewer blocks.

[Note: equal blocks]
Consecutive blocks are equal if they have the same class, submodules and plain attributes, and parameters and buffers
with the same shapes and dtypes. Integer attributes may differ if they count the blocks. Some models alternate between
different blocks, for example one block with full attention after five blocks with sliding-window attention. The
repeating unit of these models is a *period* of several blocks.

[Note: depth]
If a model has rows of equal blocks, two copies with fewer blocks are run instead of the full model. For each row, the
first copy contains some periods at each end and one *middle* period, which represents all omitted periods. The parts of
a step contain the *growth* of memory instead of its total, so the forward and the backward pass of the middle period
are the same for every omitted period. The growth in all other parts is a linear function of the number of periods, so a
second copy without the middle period shows the effect of one period on them. If the two copies differ in any other
part, the full model is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from torch import nn

from roomier.api.blocks import num_elements_of, represent_larger
from roomier.api.module import Module, network_of
from roomier.core import torch_private
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.plan.choices import POLICIES, ImportedChoice
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.fake.user_code import UnexpectedStepError, reason_of
from roomier.planner.workload import Workload
from roomier.techniques.parallel.shard import closed_blocks

T = TypeVar("T", bound=Any)  # an interval or an execution, with phase, place and growth of memory
_LONGEST_TURN = 8
_reported: WeakSet[nn.Module] = WeakSet()
_PLAIN = (bool, str, float, complex, type(None), bytes)


@dataclass(frozen=True)
class Repeat:
    """Equal consecutive blocks in one ``ModuleList`` or ``Sequential``.

    Attributes:
        container: name of the container in the network; empty for the network itself.
        first: position of the first block in the container.
        length: number of blocks in a period.
        count: number of periods.
    """

    container: str
    first: int
    length: int
    count: int

    def places(self, period: int) -> list[str]:
        """Return the names of the blocks in a period."""
        begin = self.first + period * self.length
        prefix = f"{self.container}." if self.container else ""
        return [f"{prefix}{position}" for position in range(begin, begin + self.length)]


def find_repeats(workload: Workload, plan: Plan, *, least: int) -> list[Repeat]:
    """Return the rows of at least ``least`` periods whose blocks are equal and have the same settings in ``plan``."""
    policy, names = POLICIES[plan.activation.policy], plan.adapter.lora_targets + plan.adapter.lora_trained
    names_a_block = plan.adapter.lora_rank is not None and any(each.isdigit() for each in names)
    if plan.activation.policy == "budget" or isinstance(policy, ImportedChoice) or names_a_block:
        return []
    step = (plan.activation.every_n or 2) if plan.activation.policy == "every_n" else 1
    network = network_of(workload.module)
    blocks = set(closed_blocks(network, workload.blocks))
    found: list[Repeat] = []
    for name, container in network.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and type(container) in (nn.ModuleList, nn.Sequential):
            faces = [_face_of(each) if each in blocks else None for each in container.children()]
            if len(faces) >= least and len(faces) == len(container):  # lengths differ if a block is listed twice
                found += _runs(name, faces, least, step)
    return found


def report_full_trace(module: Module, repeats: Sequence[Repeat], error: Exception) -> None:
    """Print a notice, once per model, that all blocks are traced because copies with fewer blocks cannot be used."""
    if module in _reported:
        return
    _reported.add(module)
    num_blocks = sum(each.count * each.length for each in repeats)
    name = type(network_of(module)).__name__
    why = reason_of(error)
    notice(
        f"planning traces all {num_blocks} blocks of {name}, which takes longer, because the step of a copy with fewer "
        f"blocks {why}"
    )


@dataclass(frozen=True)
class Shallow:
    """A model with fewer blocks.

    Attributes:
        module: copy that shares all modules with the original, except the containers of the blocks.
        positions: map from each container to the positions of its children in the original model.
        middle: number of the row for each block of a middle period, keyed by the name of the block in the original
            model. The periods at the ends of a row are not included.
    """

    module: Module
    positions: Mapping[str, Sequence[int]]
    middle: Mapping[str, int]

    def place_in_model(self, place: str) -> str:
        """Return the name in the original model of the part ``place`` of this copy."""
        for container, positions in self.positions.items():
            prefix = f"{container}." if container else ""
            number, *rest = place.removeprefix(prefix).split(".", 1)
            if place.startswith(prefix) and number.isdigit():
                return prefix + ".".join([str(positions[int(number)]), *rest])
        return place

    def visits(self, parts: Sequence[T]) -> list[tuple[int | None, list[T]]]:
        """Group consecutive parts of a step of this copy, and replace their places by the names in the original model.

        Returns:
            Pairs of a row and the parts of one pass through the middle blocks of this row. The row is None for parts
            outside the middle blocks. A part without a name belongs to the previous block.
        """
        found: list[tuple[tuple[int | None, str], T]] = []
        row, phase = None, ""
        for each in parts:
            part = replace(each, place=self.place_in_model(each.place))
            if part.place or part.phase != phase:
                row = self.middle.get(part.place)
            phase = part.phase
            found.append(((row, phase if row is not None else ""), part))
        return [(row, [part for _, part in group]) for (row, _), group in groupby(found, lambda each: each[0])]


def shallow_copy(module: Module, repeats: Sequence[Repeat], counts: Sequence[int], *, num_last: int = 1) -> Shallow:
    """Return a copy of ``module`` with fewer periods of blocks.

    Args:
        module: model to copy.
        repeats: rows of equal blocks.
        counts: number of retained periods for each of ``repeats``.
        num_last: number of retained periods at the end of the row. The others are at its start.
    """
    network = network_of(module)
    positions = {
        repeat.container: list(range(len(list(network.get_submodule(repeat.container).children()))))
        for repeat in repeats
    }
    for repeat, count in zip(repeats, counts, strict=True):
        begin = repeat.first + (count - num_last) * repeat.length
        left_out = range(begin, repeat.first + (repeat.count - num_last) * repeat.length)
        positions[repeat.container] = [each for each in positions[repeat.container] if each not in left_out]
    cut = {}
    for name, kept in positions.items():
        container = network.get_submodule(name)
        children = list(container.children())
        cut[container] = torch_private.with_children(
            container, {str(number): children[position] for number, position in enumerate(kept)}
        )
    copied = _copied_around(module, cut)
    represent_larger(network_of(copied), num_elements_of(network))
    middle = {
        place: row
        for row, (repeat, count) in enumerate(zip(repeats, counts, strict=True))
        for period in range(num_last, count - num_last)
        for place in repeat.places(period)
    }
    return Shallow(copied, positions, middle)


class NotLinearError(UnexpectedStepError):
    """Raised if memory does not grow linearly with the number of blocks, so the full model must be traced."""

    def __str__(self) -> str:
        return "needs memory that does not grow linearly with the number of blocks"


@dataclass(frozen=True)
class FullStep(Generic[T]):
    """Step of a model, computed from the steps of copies with fewer blocks.

    Attributes:
        parts: parts of the step, in execution order.
        work: amount of computation by part.
        names: function that returns the names of the parts of the model that a part of the largest copy represents.
    """

    parts: list[T]
    work: dict[WorkKey, Work]
    names: Callable[[str], Sequence[str]]


def step_in_full(
    module: Module,
    repeats: Sequence[Repeat],
    run: Callable[[Module], tuple[Sequence[T], Mapping[WorkKey, Work]]],
    *,
    num_ends: int,
    affects_others: Callable[[Sequence[T]], bool] = lambda _: True,
) -> FullStep[T]:
    """Return the step of ``module``; see [Note: depth].

    Args:
        module: the model.
        repeats: rows of equal blocks.
        run: function that runs a step of a copy and returns its parts and their work.
        num_ends: number of periods that the copies contain at each end of a row; 2 if the first or the last period of a
            row affects an adjacent period.
        affects_others: function that receives the passes through the middle period of a row, and returns whether they
            affect the growth in other parts.

    Raises:
        NotLinearError: the growth of memory is not a linear function of the number of blocks.
    """
    counts = [2 * num_ends + 1] * len(repeats)
    shallow = shallow_copy(module, repeats, counts, num_last=num_ends)
    parts, work = run(shallow.module)
    visits = shallow.visits(parts)
    others = _others(visits)
    represented = {
        place: [repeat.places(period)[index] for period in range(num_ends, repeat.count - num_ends)]
        for repeat in repeats
        for index, place in enumerate(repeat.places(num_ends))
    }

    def names(place: str) -> Sequence[str]:
        own = shallow.place_in_model(place)
        return represented.get(own, [own])

    own_work = {(phase, shallow.place_in_model(place)): each for (phase, place), each in work.items()}
    all_work = {
        (phase, name): each for (phase, place), each in own_work.items() for name in represented.get(place, [place])
    }
    grown = others
    for row, repeat in enumerate(repeats):
        if not affects_others([part for number, visit in visits if number == row for part in visit]):
            continue
        fewer = [count - (number == row) for number, count in enumerate(counts)]
        smaller = shallow_copy(module, repeats, fewer, num_last=num_ends)
        parts, work = run(smaller.module)
        less = _others(smaller.visits(parts))
        if [(each.phase, each.place) for each in less] != [(each.phase, each.place) for each in others]:
            raise NotLinearError
        times = repeat.count - counts[row]
        grown = [each.grown(*both, times) for each, *both in zip(grown, others, less, strict=True)]
        less_work = {(phase, smaller.place_in_model(place)): each for (phase, place), each in work.items()}
        for part in [each for each in own_work if each[1] not in represented]:
            all_work[part] += (own_work[part] + less_work.get(part, Work()) * -1) * times
    return FullStep(list(_repeated(visits, grown, represented)), all_work, names)


def _others(visits: Sequence[tuple[int | None, Sequence[T]]]) -> list[T]:
    """Return the parts of a step that are outside the middle periods."""
    return [part for row, visit in visits if row is None for part in visit]


def _repeated(
    visits: Sequence[tuple[int | None, Sequence[T]]], others: Sequence[T], represented: Mapping[str, Sequence[str]]
) -> Iterator[T]:
    """Yield the parts of the full step: the passes through all periods that a middle period represents, and
    ``others``."""
    left = iter(others)
    for row, visit in visits:
        if row is None:
            yield from islice(left, len(visit))
            continue
        periods = range(len(next(represented[each.place] for each in visit if each.place)))
        for period in periods if visit[0].phase == "forward" else reversed(periods):
            yield from (replace(each, place=each.place and represented[each.place][period]) for each in visit)


@dataclass(frozen=True)
class _Face:
    """Properties that determine the cost of a block. Equal blocks have the same ``kept``. They may differ in the
    integers of ``counted``, which may count the blocks."""

    kept: tuple[Any, ...]
    counted: tuple[int, ...]


def _face_of(block: nn.Module) -> _Face:
    kept: list[Any] = [type(block), repr(block)]
    counted: list[int] = []
    tensors = (*block.named_parameters(), *block.named_buffers())
    kept += [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors]
    for name, part in block.named_modules():
        for key, value in vars(part).items():
            if key.startswith("_"):
                continue
            if isinstance(value, int) and not isinstance(value, bool):
                kept.append((name, key))
                counted.append(value)
            else:
                kept.append((name, key, _plain(value)))
    return _Face(tuple(kept), tuple(counted))


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (int, list, tuple, set, frozenset)):
        return repr(value)
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _runs(container: str, faces: list[_Face | None], least: int, step: int) -> Iterator[Repeat]:
    position = 0
    while position < len(faces):
        best: Repeat | None = None
        for turn in range(1, _LONGEST_TURN + 1):
            length = math.lcm(turn, step)
            count = _num_periods(faces, position, length)
            if count >= least and (best is None or count * length > best.count * best.length + length):
                best = Repeat(container, position, length, count)
        if best is None:
            position += 1
        else:
            yield best
            position += best.count * best.length


def _num_periods(faces: list[_Face | None], first: int, length: int) -> int:
    position = first
    while position + length < len(faces) and _are_alike(faces[position], faces[position + length], length):
        position += 1
    return (position - first) // length + 1


def _are_alike(one: _Face | None, other: _Face | None, distance: int) -> bool:
    if one is None or other is None or one.kept != other.kept:
        return False
    return all(b - a in (0, distance) for a, b in zip(one.counted, other.counted, strict=True))


def _copied_around(module: Any, cut: Mapping[nn.Module, nn.Module]) -> Any:
    """Return ``module`` with the modules in ``cut`` replaced. Modules that contain one of the replaced modules are
    copied."""
    known: dict[nn.Module, nn.Module] = dict(cut)

    def copied(part: nn.Module) -> nn.Module:
        if part not in known:
            before = torch_private.children_of(part)
            after = {name: None if child is None else copied(child) for name, child in before.items()}
            known[part] = part if after == before else torch_private.with_children(part, after)
        return known[part]

    return copied(module)
