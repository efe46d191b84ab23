"""Checkpoint entries that a LightningModule's hooks add: data is stored, but objects are skipped and reported."""

from pathlib import Path

import torch

from roomier.checkpoint.shown import without_objects


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
