"""Read several loaders together in the four modes of Lightning's CombinedLoader.

[Note: no unnecessary reads]
Reading from a part changes its position. Therefore, a part is not read if it is already known that its batch would not
be yielded. ``max_size_cycle`` first reads the parts that have not ended. Parts that have ended restart only if one of
those reads returns a batch. ``min_size`` stops before reading if a part is known to have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from roomier.core.errors import DataError
from roomier.data import torch_loaders

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
END = object()  # END is not None, because None can be a batch of a user's loader


class JointLoader:
    """One of several loaders that are read together.

    Args:
        start: function that starts the pass with a given index, counted from 0 in each epoch. The function returns an
            iterator over the batches and the object that reads them.
        length: number of batches in a pass; ``inf`` if this number is unknown.
        name: name of the loader for errors.

    Attributes:
        length: the argument ``length``.
        name: the argument ``name``.
        limit: maximum number of batches in mode ``"sequential"``.
        cycle: index of the current pass; -1 before the first pass.
        num_read: number of batches that were yielded in the current pass.
        iterator: iterator over the remaining batches; None before the first pass and after the end of a pass.
        came_to_end: True if at least one pass of this epoch is complete.
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
        """Number of remaining batches in the current pass; ``inf`` if this number is unknown."""
        if self.cycle >= 0 and self.iterator is None:
            return 0
        return max(min(self.length, self.limit) - self.num_read, 0)

    def begin(self) -> None:
        """Start the next pass."""
        self.cycle += 1
        self.num_read = 0
        self.iterator, self._reading = self._start(self.cycle)

    def continue_from(self, iterator: Iterator[Any] | None, reading: Any, num_read: int) -> None:
        """Continue the current pass with ``iterator``, after ``num_read`` batches."""
        self.iterator, self._reading, self.num_read = iterator, reading, num_read

    def read(self) -> Any:
        """Return the next batch of the current pass, or ``END`` if the pass has no more batches."""
        batch = END if self.iterator is None else next(self.iterator, END)
        if batch is END:
            self.iterator, self.came_to_end = None, True
        else:
            self.num_read += 1
        return batch

    def stop(self) -> None:
        """Terminate the worker processes of a pass that was not read completely."""
        if self.iterator is not None:
            torch_loaders.end_workers(self._reading)
        self.iterator = self._reading = None


class Joined(NamedTuple):
    """Batches of one step, and the indices of their loaders. In mode ``"sequential"``, a step has one batch.

    Attributes:
        parts: indices of the loaders.
        batches: one batch from each loader in ``parts``.
    """

    parts: Sequence[int]
    batches: Sequence[Any]


def joined(parts: Sequence[JointLoader], mode: str) -> Iterator[Joined]:
    """Yield the batches of ``parts``, combined according to ``mode``.

    Each part must have been started by :func:`begin`, or must continue a pass. In mode ``"sequential"``, each part
    after the first begins when it is first read.
    """
    try:
        yield from _one_after_another(parts) if mode == "sequential" else _together(parts, mode)
    finally:  # otherwise the workers of incomplete passes would keep running
        for part in parts:
            part.stop()


def _together(parts: Sequence[JointLoader], mode: str) -> Iterator[Joined]:
    indices = range(len(parts))
    read = {"min_size": _read_min, "max_size": _read_max, "max_size_cycle": _read_cycle}[mode]
    while (batches := read(parts)) is not None:
        yield Joined(indices, batches)


def begin(parts: Sequence[JointLoader], mode: str) -> None:
    """Start the parts that must be started before the first batch is read."""
    for part in parts[:1] if mode == "sequential" else parts:
        part.begin()


def num_joined(lengths: Sequence[float], mode: str) -> float:
    """Return the number of steps that :func:`joined` yields for parts with the given numbers of batches."""
    if mode == "sequential":
        return sum(lengths)
    return min(lengths) if mode == "min_size" else max(lengths)


def num_joined_left(parts: Sequence[JointLoader], mode: str) -> float:
    """Return the number of steps that :func:`joined` still yields for started parts."""
    if mode == "max_size_cycle":  # parts that have restarted are not counted
        return max((part.num_left for part in parts if not part.came_to_end), default=0)
    return num_joined([part.num_left for part in parts], mode)


def _read_min(parts: Sequence[JointLoader]) -> list[Any] | None:
    if any(part.num_left == 0 for part in parts):
        return None
    batches = []
    for part in parts:
        batch = part.read()
        if batch is END:
            return None
        batches.append(batch)
    return batches


def _read_max(parts: Sequence[JointLoader]) -> list[Any] | None:
    batches = [part.read() for part in parts]
    if all(batch is END for batch in batches):
        return None
    return [None if batch is END else batch for batch in batches]


def _read_cycle(parts: Sequence[JointLoader]) -> list[Any] | None:
    batches = {number: part.read() for number, part in enumerate(parts) if not part.came_to_end}
    if all(part.came_to_end for part in parts):
        return None
    return [
        _read_again(part) if batches.get(number, END) is END else batches[number] for number, part in enumerate(parts)
    ]


def _read_again(part: JointLoader) -> Any:
    batch = part.read()
    if batch is END:
        part.begin()
        batch = part.read()
    if batch is END:
        problem = "yields no batches when it restarts, but another loader has batches left"
        action = (
            "Pass a DataLoader, or an object whose __iter__ returns a new iterator, or end the epoch with this loader: "
            "CombinedLoader(loaders, 'min_size')"
        )
        raise DataError(part.name, part.cycle, problem, action)
    return batch


def _one_after_another(parts: Sequence[JointLoader]) -> Iterator[Joined]:
    for number, part in enumerate(parts):
        if part.cycle < 0:
            if part.limit == 0:
                continue
            part.begin()
        while part.num_read < part.limit and (batch := part.read()) is not END:
            yield Joined((number,), (batch,))
        part.stop()
