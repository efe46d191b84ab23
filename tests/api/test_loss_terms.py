"""Number of terms over which the loss of a batch is averaged."""

from collections import UserDict

import pytest
import torch

from roomier.api.loss_terms import TARGET_KEYS, count_loss_terms

LABELS = torch.tensor([[1, -100, 3], [-100, -100, 2]])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.zeros(2, 3), "labels": LABELS}, 3),
        (UserDict({"labels": LABELS}), 3),
        ((torch.zeros(2, 3), LABELS), 3),
        ([torch.zeros(2, 3), LABELS], 3),
        ((torch.zeros(4, 3), torch.tensor([0, 1, 2, 1])), 4),
        ((torch.zeros(4, 3), torch.tensor([0, -100, 2, 1])), 3),
        ((torch.zeros(4, 3), torch.zeros(4, 5)), 4),
        ((torch.zeros(4, 3), torch.zeros(4, dtype=torch.bool)), 4),
        (torch.zeros(5, 3), 5),
        ({"x": torch.zeros(5, 3)}, 5),
        ({"input_ids": torch.zeros(2, 7, dtype=torch.long)}, 2),
        ((torch.zeros(5, 3),), 5),
        ({"labels": torch.full((2, 3), -100)}, 0),
        ("no tensor", 1),
    ],
    ids=str,
)
def test_counts(batch, expected):
    count = count_loss_terms(batch)
    assert count == expected
    assert type(count) is int


@pytest.mark.parametrize("key", TARGET_KEYS)
def test_names_of_targets(key):
    assert count_loss_terms({"x": torch.zeros(2, 9), key: LABELS}) == 3


def test_model_that_shifts_its_labels_drops_the_first_of_each_row():
    assert count_loss_terms({"labels": LABELS}, is_shifted_inside=True) == 2
    assert count_loss_terms({"labels": torch.tensor([1, 2, 0])}, is_shifted_inside=True) == 3


def test_targets_on_a_device_are_counted_there():
    """The count is a 0-dim tensor, so the host does not wait."""
    count = count_loss_terms({"labels": torch.empty(2, 3, dtype=torch.long, device="meta")})
    assert isinstance(count, torch.Tensor)
    assert count.device.type == "meta"
