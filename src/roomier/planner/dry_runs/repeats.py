"""Repeating blocks of a deep model, and copies of the model with fewer blocks.

[Note: equal blocks]
Consecutive blocks are equal if their class, submodules and plain attributes are equal, and if the shapes and dtypes of
their parameters and buffers are equal. Integer attributes of equal blocks may differ if these attributes count the
blocks. Some models alternate between kinds of blocks, such as one block with full attention after five blocks with
sliding-window attention. In such a model, the repeating unit is a period of several blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar
from weakref import WeakSet

from torch import nn

from roomier.api.blocks import num_elements_of, represent_larger
from roomier.api.module import Module, network_of
from roomier.core import torch_private
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.plan.choices import POLICIES, ImportedChoice
from roomier.planner.fake.user_code import reason_of
from roomier.planner.workload import Workload
from roomier.techniques.parallel.shard import closed_blocks

T = TypeVar("T", bound=Any)  # an interval or an execution, which have a phase and a place
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
    """Return the rows of equal blocks that have at least ``least`` periods and that ``plan`` treats identically."""
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
    """Print a notice that all blocks of a model are traced, because copies with fewer blocks cannot be used. The notice
    is printed once per model."""
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
        middle: map from the blocks in the middle of a row, by their names in the original model, to the number of their
            row. The retained periods at both ends of a row are not in the middle.
    """

    module: Module
    positions: Mapping[str, Sequence[int]]
    middle: Mapping[str, int]

    def place_in_model(self, place: str) -> str:
        """Return the original model's name for the part that has the name ``place`` in this copy."""
        for container, positions in self.positions.items():
            prefix = f"{container}." if container else ""
            number, *rest = place.removeprefix(prefix).split(".", 1)
            if place.startswith(prefix) and number.isdigit():
                return prefix + ".".join([str(positions[int(number)]), *rest])
        return place

    def visits(self, parts: Sequence[T]) -> list[tuple[int | None, list[T]]]:
        """Group consecutive parts of a step in this copy, and replace their places by the names in the original model.

        Returns:
            Pairs of a row and the parts of one visit to middle blocks of this row. For parts outside the middle blocks,
            the row is None. A part without a name belongs to the previous block.
        """
        found: list[tuple[tuple[int | None, str], T]] = []
        row, phase = None, ""
        for each in parts:
            part = replace(each, place=self.place_in_model(each.place))
            if part.place or part.phase != phase:
                row = self.middle.get(part.place)
            phase = part.phase
            found.append(((row, phase if row is not None else ""), part))
        groups = groupby(found, lambda each: each[0])
        return [(row, [part for _, part in group]) for (row, _), group in groups]


def shallow_copy(module: Module, repeats: Sequence[Repeat], counts: Sequence[int], *, num_last: int = 1) -> Shallow:
    """Return a copy of ``module`` with fewer periods of blocks.

    Args:
        module: model to copy.
        repeats: rows of equal blocks.
        counts: number of retained periods for each of ``repeats``.
        num_last: number of retained periods from the end of the row. The other retained periods are from the start of
            the row.
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


@dataclass(frozen=True)
class _Face:
    """Properties that determine the cost of a block. Equal blocks have equal ``kept``, but they can differ in the
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
