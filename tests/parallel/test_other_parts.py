"""Tests that a sharded model whose ranks run different blocks raises an error instead of mixing parameters."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import roomier
from tests.ranks.pool import RankFailed, RankPool

pytestmark = pytest.mark.more


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class LayerDrop(roomier.Module):
    """Module that skips one block, depending on the step and optionally on the rank."""

    def __init__(self, by_rank: bool) -> None:
        super().__init__()
        self.by_rank = by_rank
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        skipped = 1 + (batch_idx + self.by_rank * self.trainer.global_rank) % 2
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(strategy: Any, by_rank: bool, num_ranks: int) -> int:
    roomier.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    trainer = roomier.Trainer(
        max_steps=8,
        strategy=strategy,
        devices=num_ranks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LayerDrop(by_rank), torch.utils.data.DataLoader(data, batch_size=4))
    return trainer.global_step


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_ranks_that_run_different_blocks_raise(on_ranks: RankPool, strategy: str) -> None:
    with pytest.raises(RankFailed, match=r"blocks\.\d.*ran different parts of the model.*find_unused_parameters"):
        on_ranks(2, fit, strategy, True, 2)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_blocks_skipped_on_all_ranks_are_supported(on_ranks: RankPool, strategy: str) -> None:
    assert on_ranks(2, fit, strategy, False, 2) == [8, 8]


def test_ddp_supports_any_block_on_any_rank(on_ranks: RankPool) -> None:
    strategy = {"name": "ddp", "find_unused_parameters": True}
    assert on_ranks(2, fit, strategy, True, 2) == [8, 8]


class ExtraLayer(LayerDrop):
    """Module that uses an additional layer on rank 1."""

    def __init__(self) -> None:
        super().__init__(by_rank=False)
        self.extra = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        if self.trainer.global_rank:
            x = x + self.extra(x)
        return x.square().mean()


def fit_with_extra_layer(strategy: Any, patience_s: float) -> list[float]:
    from roomier.techniques.parallel import collectives

    collectives.PATIENCE = timedelta(seconds=patience_s)
    roomier.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    trainer = roomier.Trainer(
        max_steps=4,
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = ExtraLayer()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    weights = trainer.engine.weights()["extra.weight"]
    return (weights.full_tensor() if hasattr(weights, "full_tensor") else weights).flatten().tolist()


def test_layer_used_on_one_rank_trains_with_find_unused_parameters(on_ranks: RankPool) -> None:
    found = [
        on_ranks(2, fit_with_extra_layer, {"name": name, "find_unused_parameters": True}, 60.0)[0]
        for name in ("ddp", "zero2", "zero3")
    ]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5, abs=1e-7)


def test_layer_used_on_one_rank_does_not_hang(on_ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"'extra'.*ran different parts of the model.*find_unused_parameters"):
        on_ranks(2, fit_with_extra_layer, "zero2", 3.0)
