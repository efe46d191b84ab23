"""CombinedLoader, which reads several loaders together in the four modes of Lightning's CombinedLoader.

[Note: no unnecessary reads]
Reading from a part changes its position, so a part is not read if it is already known that its batch would not be
yielded. ``max_size_cycle`` first reads the parts that have not ended, and restarts the others only if one of those
reads returns a batch. ``min_size`` stops before reading if a part is known to have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, takewhile
from typing import Any, Literal, NamedTuple

from roomier.core.errors import DataError
from roomier.core.tree import map_tensors
from roomier.data import torch_loaders
from roomier.data.batch_feeds import length_of
from roomier.data.loaders import check_gives_batches, is_combined, is_loader_collection, loaders_in, map_loaders

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
    batches = list(takewhile(lambda batch: batch is not END, (part.read() for part in parts)))
    return batches if len(batches) == len(parts) else None


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


class CombinedLoader(Iterable[Any]):
    """Iterable that reads several loaders together, like Lightning's CombinedLoader.

    A Trainer accepts this class and Lightning's class. The modes are:

    - ``"min_size"``: one batch from each loader per step, until the shortest loader ends.
    - ``"max_size_cycle"``: one batch from each loader per step, until the longest loader ends. Shorter loaders restart,
      with a new shuffle.
    - ``"max_size"``: one batch from each loader per step, until the longest loader ends. The batch of a loader that has
      ended is None.
    - ``"sequential"``: one loader after another, one batch per step.

    A batch has the structure of ``iterables``: a dict of loaders yields dicts of batches. If you pass several loaders
    to a Trainer without a CombinedLoader, the mode is ``"max_size_cycle"`` in training and ``"sequential"`` in
    evaluation.

    Outside a Trainer, iteration yields ``(batch, batch_idx, dataloader_idx)``, as in Lightning.

    Args:
        iterables: loaders in lists, tuples and dicts, nested to any depth. A list of batches counts as a loader.
        mode: one of the four modes above.

    Attributes:
        iterables: the argument ``iterables``.
        mode: the argument ``mode``.
        flattened: list of the loaders in ``iterables``, in the same order.
        part_names: path of each loader in ``iterables``, such as ``"['a'][0]"``.

    Raises:
        DataError: ``mode`` is unknown, ``iterables`` contains no loader, or an object in it is not a loader or is a
            CombinedLoader.

    Example:
        >>> loaders = {"labeled": DataLoader(labeled, batch_size=8), "unlabeled": DataLoader(unlabeled, batch_size=32)}
        >>> trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"))
        >>> # training_step receives {"labeled": ..., "unlabeled": ...}
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in MODES:
            raise DataError("mode", mode, "is unknown", f"Use one of {', '.join(map(repr, MODES))}")
        self.iterables = iterables
        self.mode = mode
        found = loaders_in(iterables, "iterables")
        self.flattened = list(found.values())
        self.part_names = [name.removeprefix("iterables") for name in found]
        numbers = count()
        self._form = map_loaders(lambda _: next(numbers), iterables)

    @property
    def sampler(self) -> Any:
        """Samplers of the loaders, in the structure of ``iterables``."""
        return map_loaders(lambda loader: getattr(loader, "sampler", None), self.iterables)

    @property
    def batch_sampler(self) -> Any:
        """Batch samplers of the loaders, in the structure of ``iterables``."""
        return map_loaders(lambda loader: getattr(loader, "batch_sampler", None), self.iterables)

    def __len__(self) -> int:
        """Return the number of batches in one pass; raise TypeError if this number is unknown."""
        num_batches = num_joined([length_of(each) for each in self.flattened], self.mode)
        if not isinstance(num_batches, int):
            raise TypeError(f"{self!r} has no length")
        return num_batches

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        num_read = [0] * len(self.flattened)
        for each in joined(self._begun(), self.mode):
            dataloader_idx = each.parts[0]
            batch_idx = num_read[dataloader_idx]
            num_read[dataloader_idx] += 1
            yield self.batch_of(each), batch_idx, dataloader_idx

    def batches(self) -> Iterator[Any]:
        """Return an iterator over the batches of one pass, without indices."""
        return read_on(self._begun(), self)

    def _begun(self) -> list[JointLoader]:
        parts = [
            JointLoader(partial(_iterate, each), length_of(each), f"iterables{name}")
            for each, name in zip(self.flattened, self.part_names, strict=True)
        ]
        begin(parts, self.mode)
        return parts

    def batch_of(self, each: Joined) -> Any:
        """Return the batches of ``each`` in the structure of ``iterables``, or the only batch in mode
        ``"sequential"``."""
        if self.mode == "sequential":
            return each.batches[0]
        return map_tensors(each.batches.__getitem__, self._form, lambda leaf: isinstance(leaf, int))

    def mapped(self, function: Callable[[Any], Any]) -> CombinedLoader:
        """Return a CombinedLoader in which each loader is replaced by the result of ``function``."""
        return CombinedLoader(map_loaders(function, self.iterables), self.mode)

    def __repr__(self) -> str:
        names = ", ".join(
            f"{name}: {type(each).__name__}" if name else type(each).__name__
            for name, each in zip(self.part_names, self.flattened, strict=True)
        )
        return f"CombinedLoader({names}, mode={self.mode!r})"


def read_on(parts: Sequence[JointLoader], loader: CombinedLoader) -> Generator[Any, None, None]:
    """Yield the remaining batches of ``parts``, whose current pass has already begun."""
    for each in joined(parts, loader.mode):
        yield loader.batch_of(each)


class JointBatches(Iterable[Any]):
    """Iterable over the batches of a CombinedLoader in an evaluation, without indices.

    Args:
        combined: the CombinedLoader to read.
        shards_by_rank: True if the loaders shard their own data across ranks; otherwise None.
    """

    def __init__(self, combined: CombinedLoader, *, shards_by_rank: Literal[True] | None) -> None:
        self.combined = combined
        self.shards_by_rank = shards_by_rank

    def __len__(self) -> int:
        return len(self.combined)

    def __iter__(self) -> Iterator[Any]:
        return self.combined.batches()


def as_combined(obj: Any, name: str) -> CombinedLoader:
    """Convert a CombinedLoader of roomier or Lightning to a CombinedLoader of roomier.

    Raises:
        DataError: ``obj`` contains an object that is not a loader.
    """
    if isinstance(obj, CombinedLoader):
        return obj
    loaders_in(obj.iterables, name)  # An invalid loader raises an error with the name of the user's argument.
    return CombinedLoader(obj.iterables, obj._mode)


def as_loaders(obj: Any, name: str) -> list[Any]:
    """Return a list of the loaders of an evaluation, in their order. The ``dataloader_idx`` that a hook receives is an
    index into this list.

    Args:
        obj: one loader, a list of batches, a collection of loaders (:func:`is_loader_collection`), a CombinedLoader, or
            None for no loaders.
        name: name of the argument, for the error.

    Returns:
        The loaders. A CombinedLoader that reads its loaders together is a single loader.

    Raises:
        DataError: ``obj`` is not a loader, or contains an object that is not a loader.
    """
    if obj is None:
        return []
    if is_combined(obj):
        combined = as_combined(obj, name)
        return list(combined.flattened) if combined.mode == "sequential" else [combined]
    if is_loader_collection(obj):
        return list(loaders_in(obj, name).values())
    check_gives_batches(obj, name)
    return [obj]


def training_loader(obj: Any, name: str) -> Any:
    """Return the loader that a fit reads: ``obj`` if it is one loader, otherwise a CombinedLoader.

    Several loaders without a CombinedLoader are read in mode ``"max_size_cycle"``, as in Lightning.

    Raises:
        DataError: ``obj`` contains an object that is not a loader.
    """
    if is_combined(obj):
        return as_combined(obj, name)
    if is_loader_collection(obj):
        loaders_in(obj, name)
        return CombinedLoader(obj, "max_size_cycle")
    return obj


def batches_of(loader: Any) -> Iterator[Any]:
    """Return an iterator over one pass of a loader from :func:`training_loader`."""
    if isinstance(loader, CombinedLoader):
        return loader.batches()
    check_gives_batches(loader, "train_dataloader")
    return iter(loader)


def _iterate(loader: Any, cycle: int) -> tuple[Iterator[Any], Any]:
    iterator = iter(loader)
    return iterator, iterator
