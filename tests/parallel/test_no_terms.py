"""Tests of micro-batches without loss terms. Their loss is 0/0, and their gradient is 0 times 1/0."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.plan import Plan
from roomier.techniques.optim.configured import Configured
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more


class Masked(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

    def loss(self, batch: Any) -> Tensor:
        x, mask = batch
        return (self.layers(x).square().mean(dim=1) * mask).sum() / mask.sum()

    def num_loss_terms(self, batch: Any) -> Tensor:
        return batch[1].sum()


def train(strategy: str, num_ranks: int, num_parts: int, num_accumulated: int) -> list[list[float]]:
    """Train on this rank's share of the ``num_parts`` micro-batches of each global batch."""
    torch.manual_seed(0)
    rank = torch.distributed.get_rank()
    module = Masked()
    plan = Plan.from_dict(
        {
            "parallel": {"strategy": strategy, "devices": num_ranks, "accelerator": "cpu"},
            "batch": {"accumulate_grad_batches": num_accumulated},
        }
    )
    engine, _ = build(
        plan,
        module,
        lambda _: Configured([torch.optim.AdamW(module.parameters(), lr=0.01)]),
        EagerEngine,
        Ranks(World(rank, num_ranks, rank, 0, num_ranks)),
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator)
        mask = torch.ones(8)
        mask[:2] = float(step % 2)  # the first micro-batch has no terms in every second step
        parts = list(zip(x.chunk(num_parts), mask.chunk(num_parts), strict=True))
        engine.forward_backward(lambda batch, _: module.loss(batch), parts[rank::num_ranks])
        engine.step()
    engine.settle()
    return [whole(each).flatten().tolist() for each in module.parameters()]


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


@pytest.mark.parametrize(("num_ranks", "num_accumulated"), [(4, 1), (2, 2)])
def test_micro_batch_without_terms_contributes_zeros(on_ranks: RankPool, num_ranks: int, num_accumulated: int) -> None:
    (alone,) = on_ranks(1, train, "single", 1, 4, 4)
    strategies = ("ddp", "zero1", "zero3")
    results = on_ranks.each(num_ranks, train, [(each, num_ranks, 4, num_accumulated) for each in strategies])
    for strategy, by_rank in zip(strategies, results, strict=True):
        for found in by_rank:
            for one, other in zip(alone, found, strict=True):
                near = torch.isclose(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=1e-7)
                assert near.all(), strategy
