"""CombinedLoader: several loaders read together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from roomier.core.errors import DataError
from roomier.core.tree import map_tensors
from roomier.data.batch_feeds import length_of
from roomier.data.joint import MODES, Joined, Mode, Part, begin, joined, num_joined
from roomier.data.loaders import check_gives_batches, is_combined, is_loader_collection, loaders_in, map_loaders


class CombinedLoader(Iterable[Any]):
    """Several loaders, read together. It means what Lightning's CombinedLoader means, which a Trainer takes as well.

    - ``"min_size"``: a batch of each, until the shortest comes to its end.
    - ``"max_size_cycle"``: until the longest does; the others begin anew, with a new shuffle.
    - ``"max_size"``: until the longest does; None stands for those that came to their end.
    - ``"sequential"``: one loader after another, one batch at a time.

    A Trainer hands out batches of the form of ``iterables``: a dict of loaders gives dicts of batches. Several loaders
    without a CombinedLoader are ``"max_size_cycle"`` in training and ``"sequential"`` in evaluation.

    Iterated by hand it gives ``(batch, batch_idx, dataloader_idx)``, as Lightning's does.

    Args:
        iterables: loaders in lists, tuples and dicts, nested at will. Lists of batches count as loaders.
        mode: one of the four above.

    Attributes:
        flattened: the loaders in their order.
        part_names: where each of them stands in ``iterables``: ``"['a'][0]"``.

    Raises:
        DataError: ``mode`` is not known, there is no loader, or one of them gives no batches.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in MODES:
            raise DataError("mode", mode, "is not known", f"Use one of {', '.join(map(repr, MODES))}")
        self.iterables = iterables
        self.mode = mode
        found = loaders_in(iterables, "iterables")
        self.flattened = list(found.values())
        self.part_names = [name.removeprefix("iterables") for name in found]
        numbers = count()
        self._form = map_loaders(lambda _: next(numbers), iterables)

    @property
    def sampler(self) -> Any:
        """The samplers of the loaders, in the form of ``iterables``."""
        return map_loaders(lambda loader: getattr(loader, "sampler", None), self.iterables)

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the loaders, in the form of ``iterables``."""
        return map_loaders(lambda loader: getattr(loader, "batch_sampler", None), self.iterables)

    def __len__(self) -> int:
        """How many batches a pass gives; TypeError where nothing tells."""
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
        """The batches of one pass."""
        return read_on(self._begun(), self)

    def _begun(self) -> list[Part]:
        parts = [
            Part(_iterate(each), length_of(each), f"iterables{name}")
            for each, name in zip(self.flattened, self.part_names, strict=True)
        ]
        begin(parts, self.mode)
        return parts

    def batch_of(self, each: Joined) -> Any:
        """What is handed out for ``each``."""
        if self.mode == "sequential":
            return each.batches[0]
        return map_tensors(each.batches.__getitem__, self._form, lambda leaf: isinstance(leaf, int))

    def mapped(self, function: Callable[[Any], Any]) -> CombinedLoader:
        """The same of what ``function`` makes of each loader."""
        return CombinedLoader(map_loaders(function, self.iterables), self.mode)

    def __repr__(self) -> str:
        names = ", ".join(
            f"{name}: {type(each).__name__}" if name else type(each).__name__
            for name, each in zip(self.part_names, self.flattened, strict=True)
        )
        return f"CombinedLoader({names}, mode={self.mode!r})"


def read_on(parts: Sequence[Part], loader: CombinedLoader) -> Generator[Any, None, None]:
    """The batches of ``parts``, which have begun."""
    for each in joined(parts, loader.mode):
        yield loader.batch_of(each)


class JointBatches(Iterable[Any]):
    """The plain batches of a CombinedLoader, for an evaluation.

    Args:
        shards_by_rank: whether the loaders divide themselves among the ranks.
    """

    def __init__(self, combined: CombinedLoader, *, shards_by_rank: bool) -> None:
        self.combined = combined
        self.shards_by_rank = shards_by_rank

    def __len__(self) -> int:
        return len(self.combined)

    def __iter__(self) -> Iterator[Any]:
        return self.combined.batches()


def as_combined(obj: Any, name: str) -> CombinedLoader:
    """A CombinedLoader, roomier's or Lightning's, as roomier's.

    Raises:
        DataError: one of its loaders gives no batches.
    """
    if isinstance(obj, CombinedLoader):
        return obj
    loaders_in(obj.iterables, name)  # its error says what the user passed
    return CombinedLoader(obj.iterables, obj._mode)


def as_loaders(obj: Any, name: str) -> list[Any]:
    """The loaders of an evaluation in their order; ``dataloader_idx`` of a hook counts in this list.

    Args:
        obj: one loader, a list of batches, several loaders (:func:`is_loader_collection`; of dicts, the
            values in their order), a CombinedLoader, or None for none.
        name: what the user calls it, for the error.

    Returns:
        One loader for all where a CombinedLoader joins their batches.

    Raises:
        DataError: ``obj`` gives no batches.
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
    """What a fit trains on: ``obj`` itself where it is one loader, else a CombinedLoader, by default one that goes on
    until the longest loader comes to its end (``"max_size_cycle"``, as in Lightning).

    Raises:
        DataError: a loader in it gives no batches.
    """
    if is_combined(obj):
        return as_combined(obj, name)
    if is_loader_collection(obj):
        loaders_in(obj, name)
        return CombinedLoader(obj, "max_size_cycle")
    return obj


def batches_of(loader: Any) -> Iterator[Any]:
    """The batches of one pass over what :func:`training_loader` gave."""
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
