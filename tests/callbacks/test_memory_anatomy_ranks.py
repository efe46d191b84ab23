"""Memory of a step on two ranks: the formula of each strategy, and the results of both ranks, which each rank
receives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import roomier
from roomier.callbacks import MemoryAnatomy
from roomier.memory import anatomy
from roomier.models.gpt import GPT, GPTConfig
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more

TOKENS = torch.arange(64).view(4, 16) % 101


class Language(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(GPTConfig(vocab_size=101, context=16, num_layers=2, num_heads=2, width=32, dropout=0.0))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.gpt(batch, batch)[1]


def found(root: Path, strategy: str, precision: str) -> dict[str, Any]:
    trainer = roomier.Trainer(
        strategy=strategy,
        precision=precision,
        devices=2,
        accelerator="cpu",
        optimizer="adamw",
        learning_rate=1e-3,
        max_steps=4,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MemoryAnatomy(at_step=3)],
    )
    module = Language()
    trainer.fit(module, [TOKENS] * 10)
    return anatomy(trainer).as_dict()


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("ddp", "32-true"), ("zero1", "32-true"), ("zero2", "bf16-mixed"), ("zero3", "bf16-mixed")],
)
def test_formula_of_each_strategy(on_ranks: RankPool, tmp_path: Path, strategy: str, precision: str) -> None:
    first, second = on_ranks(2, found, tmp_path, strategy, precision)
    assert first == second, "each rank has the results of all ranks"
    assert [each["rank"] for each in first["ranks"]] == [0, 1]
    assert first["worst_rank"] == max((0, 1), key=lambda rank: sum(first["ranks"][rank]["peak"]["whole"].values()))
    for rank in first["ranks"]:
        ours = {row: rank["peak"]["states"][row] for row in ("weights", "gradients", "optimizer_states", "other")}
        rule = rank["rule"]
        for row in ("weights", "optimizer_states"):
            assert ours[row] == pytest.approx(rule[row], rel=0.03)
        # Unsharded gradients and unsharded weights exist at the same time, so they are compared together.
        assert sum(ours.values()) >= 0.97 * sum(rule[row] for row in ("weights", "gradients", "optimizer_states"))
        assert sum(rank["peak"]["whole"].values()) >= sum(rank["peak"]["states"][row] for row in ours)
    num_shards = 1 if strategy == "ddp" else 2
    assert first["bytes_per_parameter"]["weights"] == pytest.approx(4 / num_shards, rel=0.05)
    assert first["bytes_per_parameter"]["optimizer_states"] == pytest.approx(8 / num_shards, rel=0.05)
