"""Several loaders read together: the four modes of Lightning's CombinedLoader, over parts that can begin anew.

[Note: nothing is read for nothing]
What is read of a part moves its position, so a part is only asked for a batch that will be handed out, as far as that
can be told: in ``max_size_cycle`` those that have not come to their end are asked first, and the others begin anew only
where one of them has a batch left; ``min_size`` stops at a known end before it asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from roomier.core import torch_loaders
from roomier.core.errors import DataError

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
END = object()  # None is a batch that a user's loader may give


class Part:
    """One of several loaders, as it is read.

    Args:
        start: the batches of a pass over it, and what reads them; passes of an epoch are counted from 0.
        length: batches of a pass; ``inf`` where nothing tells.
        name: what the user calls it, for errors.

    Attributes:
        limit: how many batches are taken of it where parts follow each other.
        cycle: the running pass, counted from 0; -1 before the first.
        num_read: batches of the running pass that were handed out.
        iterator: gives those that are left; None where there are none, or before the first.
        came_to_end: a pass over it is behind us.
    """

    def __init__(self, start: Callable[[int], tuple[Iterator[Any], Any]], length: float, name: str) -> None:
        self.length = length
        self.name = name
        self.limit = math.inf
        self.cycle = -1
        self.num_read = 0
        self.iterator: Iterator[Any] | None = None
        self.came_to_end = False
        self._start = start
        self._reading: Any = None

    @property
    def num_left(self) -> float:
        """Batches that are left of the running pass; ``inf`` where nothing tells."""
        if self.cycle >= 0 and self.iterator is None:
            return 0
        return max(min(self.length, self.limit) - self.num_read, 0)

    def begin(self) -> None:
        """Begin the next pass."""
        self.cycle += 1
        self.num_read = 0
        self.iterator, self._reading = self._start(self.cycle)

    def go_on(self, iterator: Iterator[Any] | None, reading: Any, num_read: int) -> None:
        """Read on from ``iterator``, of a pass of which ``num_read`` batches were handed out."""
        self.iterator, self._reading, self.num_read = iterator, reading, num_read

    def read(self) -> Any:
        """The next batch of the running pass; ``END`` where there is none."""
        batch = END if self.iterator is None else next(self.iterator, END)
        if batch is END:
            self.iterator, self.came_to_end = None, True
        else:
            self.num_read += 1
        return batch

    def stop(self) -> None:
        """End the worker processes of a pass that was not read to its end."""
        if self.iterator is not None:
            torch_loaders.end_workers(self._reading)
        self.iterator = self._reading = None


class Joined(NamedTuple):
    """What is handed out at a time: a batch of each of ``parts``; in ``sequential`` of one."""

    parts: Sequence[int]
    batches: Sequence[Any]


def joined(parts: Sequence[Part], mode: str) -> Iterator[Joined]:
    """The batches of ``parts`` as ``mode`` joins them. Parts must have begun (:func:`begin`) or go on; those of
    ``sequential`` begin when it is their turn."""
    try:
        yield from _one_after_another(parts) if mode == "sequential" else _together(parts, mode)
    finally:  # workers of what is left unread would live on
        for part in parts:
            part.stop()


def _together(parts: Sequence[Part], mode: str) -> Iterator[Joined]:
    indices = range(len(parts))
    read = {"min_size": _read_min, "max_size": _read_max, "max_size_cycle": _read_cycle}[mode]
    while (batches := read(parts)) is not None:
        yield Joined(indices, batches)


def begin(parts: Sequence[Part], mode: str) -> None:
    """What of ``parts`` is started before the first batch is asked for."""
    for part in parts[:1] if mode == "sequential" else parts:
        part.begin()


def num_joined(lengths: Sequence[float], mode: str) -> float:
    """How many times :func:`joined` hands out of parts with so many batches each."""
    if mode == "sequential":
        return sum(lengths)
    return min(lengths) if mode == "min_size" else max(lengths)


def num_joined_left(parts: Sequence[Part], mode: str) -> float:
    """As :func:`num_joined`, of parts that are read already."""
    if mode == "max_size_cycle":  # what begins anew does not count
        return max((part.num_left for part in parts if not part.came_to_end), default=0)
    return num_joined([part.num_left for part in parts], mode)


def _read_min(parts: Sequence[Part]) -> list[Any] | None:
    if any(part.num_left == 0 for part in parts):
        return None
    batches = []
    for part in parts:
        batch = part.read()
        if batch is END:
            return None
        batches.append(batch)
    return batches


def _read_max(parts: Sequence[Part]) -> list[Any] | None:
    batches = [part.read() for part in parts]
    if all(batch is END for batch in batches):
        return None
    return [None if batch is END else batch for batch in batches]


def _read_cycle(parts: Sequence[Part]) -> list[Any] | None:
    batches = {number: part.read() for number, part in enumerate(parts) if not part.came_to_end}
    if all(part.came_to_end for part in parts):
        return None
    return [
        _read_anew(part) if batches.get(number, END) is END else batches[number] for number, part in enumerate(parts)
    ]


def _read_anew(part: Part) -> Any:
    batch = part.read()
    if batch is END:
        part.begin()
        batch = part.read()
    if batch is END:
        problem = "gives no batch when it begins anew, and another loader has batches left"
        action = (
            "Pass a DataLoader, or an object whose __iter__ starts anew; or end with it: CombinedLoader(loaders, "
            "'min_size')"
        )
        raise DataError(part.name, part.cycle, problem, action)
    return batch


def _one_after_another(parts: Sequence[Part]) -> Iterator[Joined]:
    for number, part in enumerate(parts):
        if part.cycle < 0:
            if part.limit == 0:
                continue
            part.begin()
        while part.num_read < part.limit and (batch := part.read()) is not END:
            yield Joined((number,), (batch,))
        part.stop()
