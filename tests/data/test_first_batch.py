"""The first batch of a loader, which is read before a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from roomier.core.errors import DataError
from roomier.data.first_batch import first_batch


class Empty(Dataset[Any]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


@pytest.mark.parametrize(
    "loader",
    [
        [],
        iter([]),
        DataLoader(Empty(), batch_size=4),
        DataLoader(Empty(), batch_size=None),
        DataLoader(Empty(), batch_size=4, num_workers=0, sampler=[]),
    ],
    ids=["list", "iterator", "batches", "samples", "own sampler"],
)
def test_a_loader_without_batches_is_rejected(loader: Any) -> None:
    with pytest.raises(DataError, match=r"train_dataloaders=.*yields no batches"):
        first_batch(loader, "train_dataloaders")


def test_first_batch_of_a_list_is_the_largest() -> None:
    small, large = torch.zeros(2), torch.zeros(3)
    found, same = first_batch([small, large, small], "train_dataloaders")
    assert found is large
    assert len(same) == 3
