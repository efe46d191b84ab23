"""CombinedLoader, which reads several loaders together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Literal

from roomier.core.errors import DataError
from roomier.core.tree import map_tensors
from roomier.data.batch_feeds import length_of
from roomier.data.joint import MODES, Joined, JointLoader, Mode, begin, joined, num_joined
from roomier.data.loaders import check_gives_batches, is_combined, is_loader_collection, loaders_in, map_loaders


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
            JointLoader(_iterate(each), length_of(each), f"iterables{name}")
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
        shards_by_rank: True if the loaders shard themselves across ranks; otherwise None.
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


def _iterate(loader: Any) -> Callable[[int], tuple[Iterator[Any], Any]]:
    def start(cycle: int) -> tuple[Iterator[Any], Any]:
        del cycle
        iterator = iter(loader)
        return iterator, iterator

    return start
