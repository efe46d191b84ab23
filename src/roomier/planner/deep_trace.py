"""A trace of a deep model in the time of a few blocks: those in the middle of a row of equal ones are seen once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from roomier.api.forward import network_of
from roomier.core.errors import RoomierError
from roomier.plan import Plan
from roomier.planner.repeats import Repeat, find_repeats, shallow_copy
from roomier.planner.trace import Passage, Trace, take_trace
from roomier.planner.work import Part, Work
from roomier.planner.workload import Workload

_NUM_TRACED = 3  # periods: the first and the last differ from those between
_LEAST = _NUM_TRACED + 2


def take_deep_trace(workload: Workload, plan: Plan, *, is_cut: bool) -> Trace:
    """As :func:`roomier.planner.trace.take_trace`.

    Where equal blocks stand in a row, a model with three periods of them is traced, and the passages of the middle one
    are written down as often as the row is long (see [Note: equal blocks] in :mod:`roomier.planner.repeats`).

    Raises:
        RoomierError: what ``build`` refuses.
    """
    repeats = find_repeats(network_of(workload.module), plan, least=_LEAST)
    if repeats:
        try:
            shallow = shallow_copy(workload.module, repeats, [_NUM_TRACED] * len(repeats))
            trace = take_trace(replace(workload, module=shallow.module), plan, is_cut=is_cut)
            return _deepened(trace, repeats)
        except RoomierError:
            raise
        except Exception:
            pass
    return take_trace(workload, plan, is_cut=is_cut)


@dataclass(frozen=True)
class _Block:
    """What a block of the shallow model stands for.

    Attributes:
        repeat: the number of its row.
        period: in the shallow model.
        names: in the whole model, for each time that it stands for one.
    """

    repeat: int
    period: int
    names: tuple[str, ...]


def _deepened(trace: Trace, repeats: Sequence[Repeat]) -> Trace:
    blocks = _blocks(repeats)
    names = {place: [place] for place in _places(trace)} | {place: list(each.names) for place, each in blocks.items()}
    passages: list[Passage] = []
    for is_middle, group in _visits(trace.passages, blocks):
        num_times = max((len(names[each.place]) for each in group), default=1) if is_middle else 1
        order = range(num_times)
        if group[0].phase == "backward":
            order = order[::-1]
        for time in order:
            passages += [
                replace(each, place=names[each.place][time if is_middle and len(names[each.place]) > 1 else 0])
                for each in group
            ]
    work: dict[Part, Work] = {}
    for (phase, place), amount in trace.work.items():
        for name in names.get(place, [place]):
            work[phase, name] = amount
    return replace(trace, passages=tuple(passages), work=work)


def _places(trace: Trace) -> set[str]:
    return {each.place for each in trace.passages} | {place for _, place in trace.work}


def _visits(passages: Sequence[Passage], blocks: Mapping[str, _Block]) -> Iterator[tuple[bool, list[Passage]]]:
    """Passages that are repeated together: those of a middle period, with what lies behind each of its blocks."""
    group: list[Passage] = []
    now: tuple[str, int] | None = None
    for passage in passages:
        block = blocks.get(passage.place)
        if passage.place:
            visit = (passage.phase, block.repeat) if block is not None and block.period == 1 else None
        else:
            visit = now if now is None or now[0] == passage.phase else None
        if visit != now and group:
            yield now is not None, group
            group = []
        now = visit
        group.append(passage)
    if group:
        yield now is not None, group


def _blocks(repeats: Sequence[Repeat]) -> dict[str, _Block]:
    """By their names in the shallow model."""
    found: dict[str, _Block] = {}
    left_out: dict[str, int] = {}  # blocks of the container, before this row
    for number, repeat in enumerate(repeats):
        prefix = f"{repeat.container}." if repeat.container else ""
        shift = left_out.get(repeat.container, 0)
        for period in range(_NUM_TRACED):
            real = [0] if period == 0 else [repeat.count - 1] if period == 2 else range(1, repeat.count - 1)
            for index in range(repeat.length):
                position = repeat.first - shift + period * repeat.length + index
                names = tuple(repeat.places(each)[index] for each in real)
                found[f"{prefix}{position}"] = _Block(number, period, names)
        left_out[repeat.container] = shift + (repeat.count - _NUM_TRACED) * repeat.length
    return found
