"""StragglerMonitor names the slow rank and the slow block, and no other rank."""

import contextlib
import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.callbacks import StragglerMonitor
from roomier.callbacks.straggler_monitor import stragglers
from roomier.core.errors import RoomierError
from roomier.core.mesh import Mesh
from roomier.core.ranks import Ranks
from roomier.core.world import World
from tests.ranks.pool import RankPool

FORWARD_S, BACKWARD_S = 0.01, 0.02


class Slow(torch.autograd.Function):
    """Identity whose passes take a given time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        time.sleep(FORWARD_S * min(factor, 1.0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(BACKWARD_S * ctx.factor)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Slow.apply(self.layer(x), self.factor)  # type: ignore[no-untyped-call]
        return out


class Net(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(Block()) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.enter(batch)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def lines_of(num_ranks: int, folder: str, strategy: dict[str, Any], slow_rank: int | None) -> list[str]:
    """Return the lines about stragglers that a fit with a slow block on ``slow_rank`` prints."""
    net = Net()
    if torch.distributed.get_rank() == slow_rank:
        net.blocks[2][0].factor = 1.5  # type: ignore[index]
    trainer = roomier.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        devices=num_ranks,
        strategy=strategy,
        max_steps=5,
        log_every_n_steps=5,
        callbacks=[StragglerMonitor(threshold=0.25)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with contextlib.redirect_stderr(io.StringIO()) as told:
        trainer.fit(net, [torch.ones(2, 8)] * 12)
    assert not any(each._forward_pre_hooks for each in net.blocks if strategy["name"] == "ddp")
    return [line for line in told.getvalue().splitlines() if "more compute" in line]


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("zero3", 2), ("ddp", 4), *(pytest.param(*each, marks=pytest.mark.more) for each in (("ddp", 2), ("zero3", 4)))],
)
def test_the_slow_rank_and_block_are_named(name: str, num_ranks: int, on_ranks: RankPool, tmp_path: Any) -> None:
    slow_rank = num_ranks - 1
    for slow, num_lines in ((slow_rank, 1), (None, 0)):
        lines, *others = on_ranks(num_ranks, lines_of, num_ranks, str(tmp_path), {"name": name}, slow)
        assert not any(others)
        assert len(lines) == num_lines
        for line in lines:
            assert line.startswith(f"roomier: rank {slow_rank}: ")
            assert line.endswith("% more compute in backward of blocks.2")
            assert 35 <= int(line.split()[3].rstrip("%")) <= 65


def test_a_rank_that_is_slow_everywhere_is_compared_with_the_typical_rank() -> None:
    typical = {f"forward of {name}": 1.0 for name in "abc"}
    slow = dict.fromkeys(typical, 1.2) | {"forward of b": 1.3}
    found = stragglers([typical, typical, slow, typical], 0.15)
    assert found == ["rank 2: 30% more compute in most blocks, most of all in forward of b"]
    assert stragglers([typical, {**typical, "forward of c": 0.5}], 0.15) == [
        "rank 0: 100% more compute in forward of c"
    ]
    assert stragglers([typical, {}], 0.15) == []


def test_context_parallelism_and_bad_thresholds_are_rejected() -> None:
    with pytest.raises(RoomierError, match="threshold=0: must be positive"):
        StragglerMonitor(0)
    trainer: Any = SimpleNamespace(ranks=Ranks(mesh=Mesh(World(0, 2), context=2)))
    with pytest.raises(RoomierError, match="cannot measure blocks in which ranks wait for each other"):
        StragglerMonitor().on_train_start(trainer, Net())
