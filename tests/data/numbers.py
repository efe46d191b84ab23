"""Datasets and loaders for the tests of feeds."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

NUM_SAMPLES = 22


class Numbers(Dataset[Tensor]):
    """Sample ``i`` is ``i``."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Noisy(Numbers):
    """Sample ``i`` is ``i`` with noise from all three global generators."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


class NoisyStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for number in range(NUM_SAMPLES):
            yield torch.tensor([number, torch.rand(()).item()])


def weighted(dataset: Dataset[Tensor], generator: torch.Generator | None = None, **options: Any) -> DataLoader[Tensor]:
    sampler = WeightedRandomSampler(torch.arange(1.0, NUM_SAMPLES + 1), NUM_SAMPLES, generator=generator)
    return DataLoader(dataset, batch_size=4, sampler=sampler, **options)


def same(left: list[Any], right: list[Any]) -> bool:
    def plain(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch.tolist()
        return [plain(part) for part in batch] if isinstance(batch, list) else batch

    return plain(left) == plain(right)


def samples(batches: list[Tensor]) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]
