"""Seeds that depend on named numbers alone, and datasets whose randomness depends on such seeds."""

import hashlib
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset


def mix_seed(*parts: int) -> int:
    """One seed in ``[0, 2**63)`` from several integers; neighbouring parts give unrelated seeds."""
    packed = b"".join(part.to_bytes(16, "little", signed=True) for part in parts)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of Python, NumPy and torch with ``seed`` in ``[0, 2**63)``."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed: it also visits every accelerator, which a worker process has no use for.
    torch.default_generator.manual_seed(seed)


class EpochSeed:
    """The seed of the running epoch, in shared memory, so that workers that outlive an epoch see the next one."""

    def __init__(self) -> None:
        self._value: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set(self, seed: int, epoch: int) -> None:
        self._value.fill_(mix_seed(seed, epoch))

    def get(self) -> int:
        return int(self._value)


class NumberedIndices(NamedTuple):
    """What a batch sampler gave, with its place in the epoch."""

    number: int
    indices: Any


class _SeededDataset(Dataset[Any]):
    """Stands before a map-style dataset in a worker process; every attribute is the dataset's own.

    A ``worker_init_fn`` reads and sets attributes on ``get_worker_info().dataset``: they must reach the
    dataset it was written for.
    """

    def __init__(self, dataset: Any, epoch_seed: EpochSeed) -> None:
        self.__dict__.update(_dataset=dataset, _epoch_seed=epoch_seed)

    def __getattr__(self, name: str) -> Any:
        # While unpickling, nothing is set yet: without this, looking for _dataset would ask itself for ever.
        if "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __repr__(self) -> str:
        return repr(self._dataset)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class SampleSeededDataset(_SeededDataset):
    """Each sample's randomness depends on (seed, epoch, index) alone, whatever worker and batch it falls to.

    This holds for what is drawn from the global generators of Python, NumPy and torch.
    """

    def __getitem__(self, index: int) -> Any:
        seed_generators(mix_seed(self._epoch_seed.get(), index))
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]  # not those of the dataset: a Subset has them


class BatchReadSeededDataset(SampleSeededDataset):
    """The same over a dataset with ``__getitems__``: a batch read at once is seeded by its first index."""

    def __getitems__(self, indices: list[int]) -> Any:
        seed_generators(mix_seed(self._epoch_seed.get(), indices[0]))
        return self._dataset.__getitems__(indices)


class NumberSeededDataset(_SeededDataset):
    """Each batch's randomness depends on (seed, epoch, number of the batch) alone.

    For samplers of the user's own, whose indices may repeat within an epoch or be no integers at all. Takes
    :class:`NumberedIndices` in place of indices.
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
    """Whether ``dataset`` reads a list of indices at once (``__getitems__``, as torch's loader asks for it). A Subset
    does where what it is cut from does."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def seeded_by_sample(dataset: Any, epoch_seed: EpochSeed) -> SampleSeededDataset:
    """``dataset`` for worker processes, with the randomness of each sample fixed by (seed, epoch, index)."""
    kind = BatchReadSeededDataset if reads_batches(dataset) else SampleSeededDataset
    return kind(dataset, epoch_seed)
