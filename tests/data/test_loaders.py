from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from roomier.core.errors import DataError
from roomier.data.combined import as_loaders
from roomier.data.loaders import is_loader_collection


class Reader:
    def __iter__(self) -> Iterator[int]:
        return iter([1])


class GraphBatch:
    """Batch like the batches of graph libraries, which can be iterated and has a ``to`` method."""

    def __iter__(self) -> Iterator[int]:
        return iter([1])

    def to(self, device: torch.device) -> "GraphBatch":
        return self


LOADER = DataLoader([1, 2])


@pytest.mark.parametrize(
    "several",
    [[LOADER], (LOADER, Reader()), {"a": LOADER, "b": Reader()}, [iter([1]), (i for i in [1])]],
)
def test_several_loaders(several: Any):
    assert is_loader_collection(several)
    assert as_loaders(several, "val") == (list(several.values()) if isinstance(several, dict) else list(several))


@pytest.mark.parametrize(
    "one",
    [
        LOADER,
        Reader(),
        [],
        [torch.zeros(2), torch.zeros(2)],
        [(torch.zeros(2), torch.zeros(2))],
        [[torch.zeros(2)]],
        [{"x": torch.zeros(2)}],
        [UserDict(x=torch.zeros(2))],
        [np.zeros(2)],
        ["text"],
        [GraphBatch()],
    ],
)
def test_one_loader(one: Any):
    assert not is_loader_collection(one)
    assert as_loaders(one, "val") == [one]


def test_no_loader():
    assert as_loaders(None, "val") == []


@pytest.mark.parametrize("wrong", [3, "text", {}, {"x": [1]}, torch.zeros(2), TensorDataset(torch.zeros(2)), object()])
def test_other_objects_are_rejected(wrong: Any):
    with pytest.raises(DataError, match="val_dataloaders="):
        as_loaders(wrong, "val_dataloaders")


def test_a_class_is_rejected() -> None:
    with pytest.raises(DataError, match=r"is a class. Pass an instance of it: DataLoader\(...\)"):
        as_loaders(DataLoader, "train_dataloaders")
