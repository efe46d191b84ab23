"""Tests of evaluations and of later fits with a context size."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from roomier import Trainer
from roomier.core.errors import RoomierError
from tests.context.fitting import Case, Fitted, Samples
from tests.context.networks import Batch
from tests.ranks.pool import RankPool


class Watched(Fitted):
    """Module that records the number of tokens in the first block."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.lengths: list[int] = []
        norm = self.network.blocks[0].norm_mlp
        norm.register_forward_hook(lambda norm, args, output: self.lengths.append(output.shape[1]))  # type: ignore[operator]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits: Tensor = self.network(batch["input_ids"])
        return logits


def seen_lengths(watched: Watched) -> set[int]:
    found = {*watched.lengths}
    watched.lengths.clear()
    return found


def evaluate(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    trainer = Trainer(
        strategy={"name": case.strategy, "context_parallel_size": case.size},
        devices=case.num_ranks,
        accelerator="cpu",
        precision="64-true",
        optimizer={"name": "adamw", "lr": 3e-3},
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    module, loader = Watched(case), DataLoader(Samples(case), batch_size=case.micro_batch)
    trainer.fit(module, loader)
    module.lengths.clear()
    found: dict[str, Any] = {"loss": trainer.validate(module, loader, verbose=False)[0]["loss"]}
    found["validate"] = seen_lengths(module)
    trainer.predict(module, loader)
    found["predict"] = seen_lengths(module)
    trainer.fit(module, loader)  # the network is sharded, so the region is known
    found["second fit"] = seen_lengths(module)
    other = Watched(case)
    found["loss before"] = trainer.validate(other, loader, verbose=False)[0]["loss"]
    found["validate before"] = seen_lengths(other)
    try:
        trainer.fit(other, loader)
    except RoomierError as error:
        found["error"] = str(error)
    return found


@pytest.mark.more
def test_an_evaluation_uses_the_slices_of_the_fit(on_ranks: RankPool) -> None:
    case = Case("gpt", "zero3", accumulate=1, length=20, num_steps=2)
    found = on_ranks(2, evaluate, case)[0]
    assert found["validate"] == found["second fit"] == {10}
    assert found["predict"] == found["validate before"] == {20}
    assert "Call fit first" in found["error"]
    [alone] = on_ranks(1, evaluate, replace(case, strategy="single", num_ranks=1, size=1))
    for name in "loss", "loss before":
        assert found[name] == pytest.approx(alone[name], abs=1e-10)
