"""Reading and changing the micro-batch size of a loader, without changing other settings."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from roomier.data.rebuild import batch_size_of, with_batch_size

DATA = range(100, 111)


class Pairs(Dataset[Tensor]):
    """Dataset whose items are batches."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(2 * index, 2 * index + 2)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("has_batch_sampler", [False, True])
def test_other_batch_sizes_keep_the_order(has_batch_sampler: bool, shuffle: bool, drop_last: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "drop_last": drop_last}
    if has_batch_sampler:
        sampler = RandomSampler(DATA, generator=generator) if shuffle else SequentialSampler(DATA)
        options = {"batch_sampler": BatchSampler(sampler, 4, drop_last)}
    loader: DataLoader[int] = DataLoader(DATA, generator=generator, **options)  # type: ignore[arg-type]
    assert batch_size_of(loader) == 4
    whole = torch.cat(list(loader)).tolist()
    generator.manual_seed(1)
    smaller = with_batch_size(loader, 2)
    assert batch_size_of(smaller) == 2
    batches = [batch.tolist() for batch in smaller]
    assert [len(batch) for batch in batches] == [2] * 5 + [1] * (not drop_last)
    assert [each for batch in batches for each in batch][: len(whole)] == whole
    assert (whole == sorted(whole)) is not shuffle


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Pairs(), batch_size=None, shuffle=True),
        lambda: DataLoader(Pairs(), batch_sampler=[[0, 1], [2]]),
        lambda: [torch.ones(2)],
    ],
)
def test_batch_size_is_none_if_torch_does_not_batch(make: Callable[[], Any]) -> None:
    assert batch_size_of(make()) is None
