"""Read the first batch of a loader before a run, without changing the batches that the run reads.

[Note: the first batch without side effects]
Reading a batch can draw random numbers and change the state of the loader. A loader that can be iterated again is
therefore iterated one additional time, and all generators and all attributes of the loader, its dataset and its
samplers are restored afterwards. The first batch of an object that can be iterated only once, such as a generator, is
read in advance and yielded again to the run.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from roomier.core.device.rng import rng_state, set_rng_state
from roomier.core.errors import DataError
from roomier.core.tree import tensors
from roomier.data import torch_loaders
from roomier.data.batch_feeds import is_same
from roomier.data.choose import no_batch, speaks_state
from roomier.data.combined import CombinedLoader, Joined
from roomier.data.rebuild import can_be_rebuilt, parts_of, plain_sampler, rebuilt, with_sampler

_NUM_LISTED = 1000  # Maximum number of batches of a list whose sizes are compared.
_DEPTH = 3  # Maximum nesting depth of datasets.


def first_batch(loader: Any, name: str) -> tuple[Any, Any]:
    """Return a batch of ``loader``, and a loader that the run reads instead of ``loader``.

    For a list of batches, the returned batch is the largest of the first 1000 batches. For other loaders, the returned
    batch is the first batch, or a batch with the same number of samples. For a CombinedLoader, one batch is selected in
    this way from each of its loaders. In mode ``"sequential"``, the largest of these batches is returned. In other
    modes, all these batches are returned together.

    Args:
        loader: loader of a run.
        name: name of the argument that the user passed, for errors.

    Returns:
        The batch, and ``loader`` itself. If ``loader`` can be iterated only once, the second element yields the
        batch again before the remaining batches.

    Raises:
        DataError: there is no batch, or reading a batch would change the batches of the run.
    """
    if isinstance(loader, CombinedLoader):
        return _of_several_loaders(loader, name)
    if isinstance(loader, (list, tuple)):
        if not loader:
            raise no_batch(name, loader)
        return max(islice(loader, _NUM_LISTED), key=_num_bytes), loader
    if isinstance(loader, Iterator):
        return _read_ahead(loader, name)
    check_is_repeatable(loader, name)
    with untouched(loader):
        try:
            if isinstance(loader, DataLoader) and can_be_rebuilt(loader):
                found = _of_data_loader(loader)
            else:
                found = _first(iter(loader))
        except StopIteration:
            raise no_batch(name, loader) from None
    return found, loader


def _of_several_loaders(loader: CombinedLoader, name: str) -> tuple[Any, CombinedLoader]:
    found = [first_batch(each, f"{name}{part}") for each, part in zip(loader.flattened, loader.part_names, strict=True)]
    batches, to_read = [batch for batch, _ in found], iter([each for _, each in found])
    if loader.mode == "sequential":
        batches = [max(batches, key=_num_bytes)]
    return loader.batch_of(Joined(range(len(batches)), batches)), loader.mapped(lambda _: next(to_read))


@contextmanager
def untouched(loader: Any) -> Iterator[None]:
    """Restore all random states and the attributes of ``loader`` and its parts when this context ends."""
    state = rng_state()
    parts = list(_all_parts(loader))
    attributes = [(each, dict(vars(each))) for each in parts if hasattr(each, "__dict__")]
    put_back = [each for part in parts for each in _put_back_generators(part)]
    positions = [(each, copy.deepcopy(each.state_dict())) for each in parts if speaks_state(each)]
    try:
        yield
    finally:
        for part, known in attributes:
            own = vars(part)
            for name in own.keys() - known.keys():
                del own[name]
            own.update(known)
        for each in put_back:
            each()
        for part, position in positions:
            part.load_state_dict(position)
        set_rng_state(state)


def check_is_repeatable(
    loader: Any, name: str, instead: str = "set a strategy without memory_budget, which requires no first batch"
) -> None:
    """Reject a loader that would yield different batches in a second iteration.

    Args:
        loader: loader of a run.
        name: name of the argument that the user passed, for errors.
        instead: action that the error message suggests as an alternative to changing the loader.

    Raises:
        DataError: the loader has an iterator that can be read only once. The message names the iterator.
    """
    if isinstance(loader, CombinedLoader):
        for each, part_name in zip(loader.flattened, loader.part_names, strict=True):
            check_is_repeatable(each, f"{name}{part_name}", instead)
        return
    if getattr(loader, "num_workers", 0):
        return  # each worker reads a copy of the dataset
    for part in _all_parts(loader):
        for attribute, value in vars(part).items() if hasattr(part, "__dict__") else ():
            if isinstance(value, Iterator):
                problem = f"reads from {type(part).__name__}.{attribute}, which can be iterated only once"
                action = f"Create the iterator in __iter__, or {instead}"
                raise DataError(name, loader, f"{problem}, so its first batch cannot be read in advance", action)


def _of_data_loader(loader: DataLoader[Any]) -> Any:
    changes: dict[str, Any] = {"pin_memory": False}
    if loader.num_workers:  # a worker has copies of all objects, and can access data that this process cannot access
        changes |= {"num_workers": 1, "persistent_workers": False}
    if plain_sampler(loader) is None or torch_loaders.makes_own_iterator(loader):
        copied = rebuilt(loader, **changes, **_copied_samplers(loader))
    else:
        copied = with_sampler(loader, SequentialSampler(loader.dataset), **changes)  # type: ignore[arg-type]
    batches = iter(copied)
    try:
        return next(batches)
    finally:
        torch_loaders.end_workers(batches)


def _copied_samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return copies of the samplers of ``loader``, which draw the same indices and leave the originals unchanged."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    memo: dict[int, Any] = {id(loader.dataset): loader.dataset}
    return {
        field: copy.deepcopy(getattr(loader, field), memo)
        for field in ("sampler", "batch_sampler")
        if getattr(loader, field) is not None
    }


class ReadAhead(Iterator[Any]):
    """Iterator that yields the batches in ``read`` and then the remaining batches of ``inner``. The iterator has the
    attributes of ``inner``.

    Args:
        read: batches that were already read from ``inner``.
        inner: iterator that the user passed.
    """

    def __init__(self, read: Sequence[Any], inner: Iterator[Any]) -> None:
        self._read = list(read)
        self._inner = inner

    def __next__(self) -> Any:
        return self._read.pop(0) if self._read else next(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_inner"], name)


def _read_ahead(loader: Iterator[Any], name: str) -> tuple[Any, Any]:
    before = rng_state()
    try:
        found = next(loader)
    except StopIteration:
        raise no_batch(name, loader) from None
    if not is_same(before, rng_state()):
        problem = "can be iterated only once and draws random numbers, so its first batch cannot be read in advance"
        action = (
            "Pass a DataLoader or an object whose __iter__ returns a new iterator, or set a strategy without "
            "memory_budget"
        )
        raise DataError(name, loader, problem, action)
    return found, ReadAhead([found], loader)


def _first(iterator: Iterator[Any]) -> Any:
    found = next(iterator)
    close = getattr(iterator, "close", None)
    if callable(close):
        close()
    return found


def _all_parts(loader: Any) -> Iterator[Any]:
    """Yield ``loader``, its samplers, its collate function, and its datasets including nested datasets."""
    if isinstance(loader, CombinedLoader):
        for each in loader.flattened:
            yield from _all_parts(each)
        return
    yield from parts_of(loader)
    collate = getattr(loader, "collate_fn", None)
    if collate is not None and hasattr(collate, "__dict__"):
        yield collate
    level = [getattr(loader, "dataset", None)]
    for _ in range(_DEPTH):
        inner = [
            each
            for dataset in level
            for each in (getattr(dataset, "dataset", None), getattr(dataset, "transform", None), *_of_several(dataset))
            if each is not None
        ]
        yield from inner
        level = inner


def _of_several(dataset: Any) -> Iterable[Any]:
    several = getattr(dataset, "datasets", ())
    return several if isinstance(several, (list, tuple)) else ()


def _put_back_generators(part: Any) -> Iterator[Callable[[], Any]]:
    """Yield functions that restore the current states of the generators that are attributes of ``part``."""
    for value in vars(part).values() if hasattr(part, "__dict__") else ():
        if isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            yield partial(value.setstate, value.getstate())
        elif isinstance(value, np.random.RandomState):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, np.random.Generator):
            yield partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))


def _num_bytes(batch: Any) -> int:
    return sum(each.nbytes for each in tensors(batch))
