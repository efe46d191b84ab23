"""Paths of a run that begin with ``~``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from roomier import Module, Trainer


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()


def test_a_tilde_is_expanded_in_every_path_of_a_run(
    tmp_path: Path, make_trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    batches = [torch.ones(2, 3)]
    settings = {"optimizer": "sgd", "default_root_dir": "~/runs"}
    first = make_trainer(max_steps=1, **settings)
    saved = Line()
    first.fit(saved, batches)
    first.save_checkpoint("~/mine")
    begun = Line()
    make_trainer(max_steps=0, **settings).fit(begun, batches, weights="~/mine")

    again = make_trainer(max_steps=2, max_epochs=2, **settings)
    again.fit(Line(), batches, ckpt_path="~/mine")

    assert again.global_step == 2
    assert torch.equal(begun.layer.weight, saved.layer.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert "mine" in {path.name for path in (tmp_path / "home").iterdir()}
