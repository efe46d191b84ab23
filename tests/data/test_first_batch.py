"""The first batch of a loader, looked at before a run reads it."""

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
def test_where_there_is_no_batch_it_is_said(loader: Any) -> None:
    with pytest.raises(DataError, match=r"train_dataloaders=.*gives no batch"):
        first_batch(loader, "train_dataloaders")


def test_of_a_list_it_is_the_largest() -> None:
    small, large = torch.zeros(2), torch.zeros(3)
    found, same = first_batch([small, large, small], "train_dataloaders")
    assert found is large
    assert len(same) == 3
