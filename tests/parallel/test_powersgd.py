"""Tests of compressed gradients under ddp: PowerSGD and bfloat16."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn import functional as F

import roomier
from roomier.core.errors import RoomierError
from roomier.plan import plan_from_flags
from tests.parallel.parity import engine_of, whole_weights
from tests.ranks.pool import RankPool


class Regression(roomier.Module):
    """Module that learns the function of a random network of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = network(seed=1).requires_grad_(False)
        self.network = network(seed=0)

    def training_step(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.network(x), self.teacher(x))


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 4))


def learn(num_steps: int, accumulate: int = 1, **strategy: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return the loss of each step over all ranks, and the weights."""
    module, num_ranks = Regression(), int(os.environ["WORLD_SIZE"])
    plan = plan_from_flags(
        strategy={"name": "ddp", **strategy},
        accelerator="cpu",
        devices=num_ranks,
        accumulate_grad_batches=accumulate,
        optimizer={"name": "adamw", "lr": 3e-3},
    )
    engine, ranks = engine_of(module, plan)
    losses = []
    for step in range(num_steps):
        batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        own = batch.chunk(num_ranks * accumulate)[ranks.world.rank :: num_ranks]
        loss = engine.forward_backward(lambda batch, _: module.training_step(batch), own)
        assert loss is not None
        engine.step()
        losses.append(ranks.sum(loss).item())
    return losses, whole_weights(module.network)


def learn_with(num_steps: int, accumulate: int, strategy: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    return learn(num_steps, accumulate, **strategy)


def last(losses: list[float]) -> float:
    return sum(losses[-20:]) / 20


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_powersgd_learns_almost_as_fast(on_ranks: RankPool, num_ranks: int) -> None:
    num_steps = 100
    plain, _ = on_ranks(num_ranks, learn, num_steps)[0]
    settings = {"gradient_compression": "powersgd", "compression_warmup_steps": 20}
    results = on_ranks(num_ranks, learn, num_steps, **settings)
    losses, weights = results[0]
    assert losses[:20] == pytest.approx(plain[:20], rel=1e-4)  # uncompressed gradients
    assert losses[22:] != pytest.approx(plain[22:], rel=1e-3)
    assert last(plain) < 0.2 * plain[0]
    assert last(losses) == pytest.approx(last(plain), rel=0.1)
    for _, other in results[1:]:  # all ranks took the same steps
        assert all(torch.equal(other[name], weight) for name, weight in weights.items())


@pytest.mark.more
def test_higher_rank_reduces_the_error(on_ranks: RankPool) -> None:
    settings = {"gradient_compression": "powersgd", "compression_warmup_steps": 3}
    options = [{}, *({**settings, "compression_rank": rank} for rank in (1, 12))]
    plain, *results = (by_rank[0][1] for by_rank in on_ranks.each(2, learn_with, [(60, 1, each) for each in options]))
    low, high = (
        sum((weights[name] - weight).square().sum().item() for name, weight in plain.items()) for weights in results
    )
    assert high < 0.7 * low


@pytest.mark.more
def test_powersgd_with_accumulation(on_ranks: RankPool) -> None:
    settings = {"gradient_compression": "powersgd", "compression_warmup_steps": 5}
    once, twice = (by_rank[0][0] for by_rank in on_ranks.each(2, learn_with, [(30, 1, settings), (30, 2, settings)]))
    # With accumulation, a rank has different samples. Therefore, the factors differ, and the losses are only
    # approximately equal.
    assert twice[:5] == pytest.approx(once[:5], rel=1e-4)
    assert twice == pytest.approx(once, rel=0.05)


def learn_in_several_buckets(num_steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    module = Wide()
    strategy = {"name": "ddp", "gradient_compression": "powersgd", "compression_warmup_steps": 3}
    plan = plan_from_flags(strategy=strategy, accelerator="cpu", devices=2, optimizer="adamw")
    engine, ranks = engine_of(module, plan)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(10 * step + ranks.world.rank)
        engine.forward_backward(lambda batch, _: module.training_step(batch), [torch.randn(2, 64, generator=generator)])
        engine.step()
    return [each.detach() for each in module.parameters()]


class Wide(roomier.Module):
    """Model with 6.6 MB in layers of many sizes, for which DDP creates several buckets. The first bucket has 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [64, 400, 600, 500, 700, 600, 64]
        self.network = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))

    def training_step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.network(x).square().mean()
        return loss


@pytest.mark.more
def test_several_buckets_do_not_mix(on_ranks: RankPool) -> None:
    for one, other in zip(*on_ranks(2, learn_in_several_buckets, 30), strict=True):
        assert torch.equal(one, other)


def test_compression_is_reported(on_ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    on_ranks(2, learn, 6, gradient_compression="powersgd", compression_warmup_steps=4)
    notices = [line for line in capsys.readouterr().out.splitlines() if "powersgd" in line]
    assert len(notices) == 2
    assert "uncompressed gradients for the first 4 steps of this run, then factors of rank 4" in notices[0]
    assert "a resumed run repeats the warm-up" in notices[0]
    whole = 64 * 96 + 96 + 96 * 48 + 48 + 48 * 4 + 4
    factors = 4 * (64 + 96) + 96 + 4 * (96 + 48) + 48 + 48 * 4 + 4
    assert (
        f"each later step sends {factors} numbers instead of {whole}, {whole / factors:.1f} times fewer" in notices[1]
    )


def first_compressed_step() -> list[int]:
    seen: list[int] = []
    original = PowerSGDState.maybe_increase_iter
    steps = 0

    def count(state: PowerSGDState, bucket: Any) -> None:
        if state.total_numel_before_compression and not seen:
            seen.append(steps)
        original(state, bucket)

    PowerSGDState.maybe_increase_iter = count  # type: ignore[method-assign]
    module = Regression()
    strategy = {"name": "ddp", "gradient_compression": "powersgd", "compression_warmup_steps": 7}
    plan = plan_from_flags(strategy=strategy, accelerator="cpu", devices=2, optimizer="adamw")
    engine, _ = engine_of(module, plan)
    for steps in range(1, 12):  # noqa: B007 - count() reads it
        engine.forward_backward(lambda batch, _: module.training_step(batch), [torch.randn(4, 64)])
        engine.step()
    return seen


@pytest.mark.more
def test_length_of_the_warm_up(on_ranks: RankPool) -> None:
    assert on_ranks(2, first_compressed_step) == [[8], [8]]


class Manual(Regression):
    automatic_optimization = False


def build_with_manual_optimization() -> None:
    plan = plan_from_flags(
        strategy={"name": "ddp", "gradient_compression": "powersgd"}, accelerator="cpu", devices=2, optimizer="adamw"
    )
    with pytest.raises(RoomierError, match=r"gradient_compression.*is not supported with manual optimization"):
        engine_of(Manual(), plan)


@pytest.mark.more
def test_manual_optimization_is_rejected(on_ranks: RankPool) -> None:
    on_ranks(2, build_with_manual_optimization)


# ---- bfloat16 ----------------------------------------------------------------------------------------------------


ROUNDED = [("ddp", 2), ("zero2", 2), ("zero3", 1)]
ROUNDED += [pytest.param(*each, marks=pytest.mark.slow) for each in (("ddp", 1), ("zero1", 2))]


@pytest.mark.more
@pytest.mark.parametrize(("name", "accumulate"), ROUNDED)
def test_gradients_in_bfloat16_change_the_result_little(on_ranks: RankPool, name: str, accumulate: int) -> None:
    options = [{"name": name}, {"name": name, "reduce_dtype": "bf16"}]
    [(exact, weights), _], [(rounded, near), _] = on_ranks.each(
        2, learn_with, [(20, accumulate, each) for each in options]
    )
    # Rounding changes a gradient by at most 2^-9, and the steps of Adam depend mostly on the sign of the gradient.
    assert rounded == pytest.approx(exact, rel=0.01)
    apart = [(near[each] - weight).norm() / weight.norm() for each, weight in weights.items()]
    assert 0 < max(apart) < 0.02
