"""Checkpoint entries that hooks read under the names of Lightning, and entries that hooks add. Data is stored, but
objects are skipped and reported."""

from pathlib import Path

import pytest
import torch

from roomier.checkpoint.shown import ShownCheckpoint, without_objects


def test_objects_are_skipped_and_reported() -> None:
    weight = torch.ones(2)
    state = {
        "module": {"weight": weight},
        "hyperparameters": {"lr": 0.1, "loss": Path("x"), "layers": [1, 2]},
        "extra": {"encoder": {"fitted": object(), "size": 3}, "pair": (1, object()), "triple": (1, 2.0, "a")},
        "alone": object(),
    }
    kept, left_out = without_objects(state)
    assert kept["module"] is state["module"]
    assert kept["hyperparameters"] == {"lr": 0.1, "layers": [1, 2]}
    assert kept["extra"] == {"encoder": {"size": 3}, "triple": (1, 2.0, "a")}
    assert "alone" not in kept
    assert left_out == [
        "[\"hyperparameters\"]['loss']",
        "[\"extra\"]['encoder']['fitted']",
        "[\"extra\"]['pair']",
        '["alone"]',
    ]


@pytest.mark.parametrize(("epoch", "batch_idx", "shown"), [(0, 0, 0), (0, 3, 0), (1, 0, 0), (1, 3, 1), (2, 0, 1)])
def test_the_epoch_of_an_earlier_checkpoint(epoch: int, batch_idx: int, shown: int) -> None:
    progress = {"epoch": epoch, "batch_idx": batch_idx, "global_step": 7}
    assert ShownCheckpoint({"progress": progress})["epoch"] == shown
    assert ShownCheckpoint({"progress": progress, "epoch": 5})["epoch"] == 5
    assert "epoch" in ShownCheckpoint({"progress": progress})
