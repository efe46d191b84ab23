"""A custom training loop on several ranks saves and resumes like the Trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import roomier
from roomier import checkpoint
from roomier.checkpoint.agree import all_ranks
from roomier.plan import plan_from_flags
from tests.covering import few
from tests.ranks.pool import RankPool


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def train(folder: Path, strategy: str, num_steps: int, path: Path | None = None) -> list[float]:
    torch.manual_seed(0)
    num_ranks = dist.get_world_size()
    model = Regression()
    plan = plan_from_flags(
        strategy=strategy, accelerator="cpu", devices=num_ranks, optimizer={"name": "adamw", "lr": 0.01, "eps": 1e-3}
    )
    engine = roomier.prepare(model, plan=plan)
    first = 0
    if path is not None:
        state = checkpoint.load(path, ranks=all_ranks())
        engine.load(state["engine"])
        first = state["step"]
    batches = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in batches[first:num_steps]:
        share = batch.chunk(num_ranks)[dist.get_rank()]
        loss = engine.forward_backward(engine.module, [share])
        engine.step()
        total = loss.clone()
        dist.all_reduce(total)
        losses.append(float(total))
    checkpoint.save(folder / "saved", {"engine": engine.state(), "step": num_steps})
    return losses


@pytest.fixture(scope="module")
def undisturbed(on_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses: list[float] = on_ranks(2, train, tmp_path_factory.mktemp("whole"), "ddp", 6)[0]
    return losses


@pytest.mark.parametrize(
    ("before", "after"),
    few([(("zero3", 2), ("zero2", 2)), (("ddp", 2), ("zero3", 2)), (("zero1", 4), ("ddp", 2))]),
    ids=str,
)
def test_resume_with_another_strategy(
    before: tuple[str, int], after: tuple[str, int], undisturbed: list[float], on_ranks: RankPool, tmp_path: Path
) -> None:
    first = on_ranks(before[1], train, tmp_path, before[0], 3)[0]
    second = on_ranks(after[1], train, tmp_path / "on", after[0], 6, tmp_path / "saved")[0]
    assert first + second == pytest.approx(undisturbed, rel=1e-5)
