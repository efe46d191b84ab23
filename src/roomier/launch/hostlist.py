"""SLURM's short forms: lists of hosts, and tasks per node."""

from __future__ import annotations

import re
from collections.abc import Iterator

_COUNT = re.compile(r"(?P<count>\d+)(\(x(?P<times>\d+)\))?")


def first_host(text: str) -> str:
    """The first of a list of hosts: ``"gpu[03-05,9],login"`` -> ``"gpu03"``."""
    return next(hosts(text))


def hosts(text: str) -> Iterator[str]:
    """The hosts of SLURM's list, in its order: ``"a[1-2]b,c"`` -> ``"a1b"``, ``"a2b"``, ``"c"``.

    Raises:
        ValueError: it is no such list.
    """
    for part in _split(text):
        yield from _expand(part)


def tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` -> ``[2, 2, 2, 1]``.

    Raises:
        ValueError: it is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(text)
        counts += [int(found["count"])] * int(found["times"] or 1)
    return counts


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside brackets."""
    depth, start = 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    if depth != 0 or not text[start:].strip():
        raise ValueError(text)
    yield text[start:].strip()


def _expand(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for piece in inside.split(","):
        low, dash, high = piece.partition("-")
        numbers = [f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1)] if dash else [low]
        for number in numbers:
            for tail in _expand(after):
                yield f"{before}{number}{tail}"
