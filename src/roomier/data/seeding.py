"""Datasets whose random numbers depend only on given seeds, and random states that are identical on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from roomier.core.device.rng import mix_seed, seed_generators


class EpochSeed:
    """Seed of the current epoch. The seed is in shared memory, so that persistent workers also read the seeds of later
    epochs."""

    def __init__(self) -> None:
        self._value: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set(self, seed: int, epoch: int) -> None:
        """Derive the seed of ``epoch`` from the seed of the run, and store the result."""
        self._value.fill_(mix_seed(seed, epoch))

    def get(self) -> int:
        """Return the seed of the current epoch."""
        return int(self._value)


class NumberedIndices(NamedTuple):
    """Indices of the samples of one batch, and the index of the batch in its epoch.

    Attributes:
        number: index of the batch, counted from 0.
        indices: indices that the batch sampler yielded.
    """

    number: int
    indices: Any


class _SeededDataset(Dataset[Any]):
    """Wrapper for a map-style dataset in a worker process. Attribute accesses are forwarded to the wrapped dataset.

    A ``worker_init_fn`` can read and set attributes of ``get_worker_info().dataset``. These attributes must be
    attributes of the user's dataset.
    """

    def __init__(self, dataset: Any, epoch_seed: EpochSeed) -> None:
        self.__dict__.update(_dataset=dataset, _epoch_seed=epoch_seed)

    def __getattr__(self, name: str) -> Any:
        # During unpickling, no attribute is set yet, and a lookup of _dataset would recurse infinitely.
        if "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __repr__(self) -> str:
        return repr(self._dataset)


class SampleSeededDataset(_SeededDataset):
    """Dataset in which the random numbers of each sample depend on (seed, epoch, index), but not on the worker or
    batch.

    This guarantee applies to random numbers from the global generators of Python, NumPy and torch. If the dataset
    reads each batch with one call of ``__getitems__``, the first index of a batch seeds the batch.
    """

    def __getitem__(self, index: int) -> Any:
        seed_generators(mix_seed(self._epoch_seed.get(), index))
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        if not reads_batches(self._dataset):
            return [self[index] for index in indices]
        seed_generators(mix_seed(self._epoch_seed.get(), indices[0]))
        return self._dataset.__getitems__(indices)


class NumberSeededDataset(_SeededDataset):
    """Dataset in which the random numbers of each batch depend only on (seed, epoch, index of the batch).

    This dataset is used with custom samplers, whose indices can repeat within an epoch or have any type. The dataset
    receives :class:`NumberedIndices` instead of indices.
    """

    def __getitem__(self, numbered: NumberedIndices) -> Any:
        seed_generators(mix_seed(self._epoch_seed.get(), numbered.number))
        return self._dataset[numbered.indices]

    def __getitems__(self, numbered: NumberedIndices) -> Any:
        seed_generators(mix_seed(self._epoch_seed.get(), numbered.number))
        if reads_batches(self._dataset):
            return self._dataset.__getitems__(numbered.indices)
        return [self._dataset[index] for index in numbered.indices]


def reads_batches(dataset: Any) -> bool:
    """Return True if torch's loader reads each batch from ``dataset`` with one call of ``__getitems__``.

    Every Subset has this method, but reads a batch with one call only if its underlying dataset also has the method.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class CommonDraws:
    """Separate states for the CPU generators of Python, NumPy and torch. The context :meth:`inside` uses these states.

    A sampler that shuffles with the global generators yields the same order on all ranks only if the states of these
    generators are identical on all ranks. The global states can differ, for example after dropout.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None
        self._is_inside = False

    @property
    def are_seeded(self) -> bool:
        """True after :meth:`seed`."""
        return self._states is not None

    def seed(self, seed: int, epoch: int) -> None:
        """Set the separate states to values that depend only on ``seed`` and ``epoch``."""
        outer = _states()
        seed_generators(mix_seed(seed, epoch))
        self._states = _states()
        _set_states(outer)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Use the separate states in this context, and restore the global states when the context ends. Contexts can be
        nested."""
        if self._is_inside:
            yield
            return
        assert self._states is not None, "seed() comes first"
        self._is_inside = True
        outer = _states()
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(outer)
            self._is_inside = False

    def read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the elements of ``iterator``, which runs with the separate states."""
        while True:
            with self.inside():
                try:
                    each = next(iterator)
                except StopIteration:
                    return
            yield each


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
