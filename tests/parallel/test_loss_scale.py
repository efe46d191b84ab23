"""Tests that all ranks skip a 16-mixed step if the gradient of one rank is not finite."""

from typing import Any

import pytest
import torch
from torch import nn

from roomier.api.adapt import as_module
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.plan import Plan
from roomier.techniques.optim.configured import Configured
from tests.covering import few
from tests.ranks.pool import RankPool


def train_three_steps(num_ranks: int, strategy: str, bad_rank: int) -> list[dict[str, Any]]:
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    plan = Plan.from_dict(
        {
            "parallel": {"strategy": strategy, "devices": num_ranks, "accelerator": "cpu"},
            "precision": {"mode": "16-mixed"},
            "batch": {"gradient_clip_val": 1.0},
        }
    )
    engine, _ = build(
        plan,
        as_module(model),
        lambda _: Configured([torch.optim.AdamW(model.parameters(), lr=0.1)]),
        EagerEngine,
        Ranks(World(rank, num_ranks, rank, 0, num_ranks)),
    )
    rows = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 4, generator=generator)[rank::num_ranks]
        engine.forward_backward(lambda x, _: 1e-3 * model(x).float().square().mean(), [batch])
        before = [local_part(each).clone() for each in model.parameters()]
        if step == 1 and rank == bad_rank:
            part = next(g for each in model.parameters() if (g := local_part(each.grad)).numel())
            part.view(-1)[0] = float("inf")
        engine.clip()
        engine.step()
        is_same = [torch.equal(old, local_part(new)) for old, new in zip(before, model.parameters(), strict=True)]
        scaler = engine.scaler
        assert scaler is not None
        rows.append({"is_same": all(is_same), "num_skipped": float(scaler.num_skipped), "scale": scaler.factor})
    return rows


def local_part(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize(("strategy", "num_ranks"), few([("zero3", 2), ("zero1", 2), ("zero2", 4), ("hsdp", 2)]))
def test_all_ranks_skip_a_step_that_overflows_on_one_rank(on_ranks: RankPool, strategy: str, num_ranks: int) -> None:
    rows = on_ranks(num_ranks, train_three_steps, num_ranks, strategy, num_ranks - 1)
    assert all(each == rows[0] for each in rows)
    assert [row["is_same"] for row in rows[0]] == [False, True, False]
    assert [row["num_skipped"] for row in rows[0]] == [0, 1, 1]
    assert [row["scale"] for row in rows[0]] == [65536.0, 32768.0, 32768.0]
