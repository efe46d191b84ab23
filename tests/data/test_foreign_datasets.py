"""A dataset from the datasets package is rejected with an error that shows the required DataLoader."""

import pytest
import torch
from torch import nn

import roomier
from roomier.core.errors import DataError

pytestmark = pytest.mark.more


class Dataset:
    """The parts of datasets.Dataset because of which it resembles a loader: iteration and a length."""

    __module__ = "datasets.arrow_dataset"

    def __len__(self) -> int:
        return 2

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([{"input_ids": [1, 2]}, {"input_ids": [3]}])


class IterableDataset(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    __module__ = "datasets.iterable_dataset"

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([{"input_ids": [1, 2]}])


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_the_error_contains_the_loader(kind: type) -> None:
    trainer = roomier.Trainer(max_steps=1, optimizer="sgd", logger=False, enable_checkpointing=False)
    for loaders in ({"train_dataloaders": kind()}, {"train_dataloaders": [torch.ones(1)], "val_dataloaders": kind()}):
        with pytest.raises(
            DataError, match=r"yields samples instead of batches\. Pass DataLoader\(dataset\.with_format"
        ):
            trainer.fit(nn.Linear(1, 1), **loaders)
