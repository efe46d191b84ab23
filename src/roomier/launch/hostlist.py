"""Parses SLURM's compact notation for lists of hosts and for the number of tasks per node."""

from __future__ import annotations

import re
from collections.abc import Iterator

_COUNT = re.compile(r"(?P<count>\d+)(\(x(?P<times>\d+)\))?")


def first_host(text: str) -> str:
    """Return the first host of a list: ``"gpu[03-05,9],login"`` yields ``"gpu03"``."""
    return next(hosts(text))


def hosts(text: str) -> Iterator[str]:
    """Iterate over the hosts of a SLURM list: ``"a[1-2]b,c"`` yields ``"a1b"``, ``"a2b"`` and ``"c"``.

    Raises:
        ValueError: ``text`` is not a list of hosts.
    """
    for part in _split(text):
        yield from _expand(part)


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node: ``"2(x3),1"`` becomes ``[2, 2, 2, 1]``.

    Raises:
        ValueError: ``text`` is not a list of tasks per node.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(text)
        counts += [int(found["count"])] * int(found["times"] or 1)
    return counts


def _split(text: str) -> Iterator[str]:
    """Split ``text`` at commas outside brackets."""
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
