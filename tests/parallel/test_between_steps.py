"""Tests of reads and hooks between backward and the next forward, and of identical initial values on all ranks."""

import platform
import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.plan import Plan
from roomier.techniques.optim.configured import Configured
from tests.covering import few
from tests.ranks.pool import RankPool

SHARDED = ["zero1", "zero2", "zero3"]


class Layers(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(3))
        self.head = nn.Linear(64, 1)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        loss: Tensor = (self.head(batch) - 1).square().mean()
        return loss


class FillsWithZeros(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def losses(
    strategy: str, optimizer: type[torch.optim.Optimizer], runs_block: bool, num_ranks: int, rank: int
) -> list[float]:
    torch.manual_seed(0)
    module = Layers()
    ranks = Ranks(World(rank, num_ranks, rank, 0, num_ranks))
    plan = Plan.from_dict({"parallel": {"strategy": strategy, "devices": num_ranks, "accelerator": "cpu"}})
    made = lambda _: Configured([optimizer(module.parameters(), lr=0.05)])  # noqa: E731
    engine, _ = build(plan, module, made, EagerEngine, ranks)
    generator = torch.Generator().manual_seed(rank)

    @torch.no_grad()
    def run_block() -> None:
        module.blocks[0](torch.ones(2, 64))

    found = []
    for _ in range(4):
        loss = engine.forward_backward(
            lambda batch, _: module.training_step(batch), [torch.randn(8, 64, generator=generator)]
        )
        if runs_block:
            run_block()
        engine.step()
        assert loss is not None
        found.append(ranks.sum(loss).item())
    return found


class StepsInBackward(torch.optim.SGD):
    """Optimizer that updates each weight in a hook, as soon as its gradient is accumulated."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(list(parameters), lr=lr)
        for each in self.param_groups[0]["params"]:
            each.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        parameter.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def losses_on_rank(*args: Any) -> list[float]:
    return losses(*args, rank=torch.distributed.get_rank())


@pytest.mark.parametrize("strategy", few(SHARDED))
def test_gradients_and_parameters_between_backward_and_update(on_ranks: RankPool, strategy: str) -> None:
    cases = [(torch.optim.SGD, False), (FillsWithZeros, False), (StepsInBackward, False), (torch.optim.SGD, True)]
    calls = [(strategy, optimizer, runs_block, 2) for optimizer, runs_block in cases]
    plain, filled, in_backward, with_reads = on_ranks.each(2, losses_on_rank, calls)
    assert filled == plain, "reduced gradients are added to gradients filled with zeros"
    assert in_backward == [pytest.approx(each, rel=1e-4) for each in plain], "hooks receive reduced gradients"
    assert with_reads == plain, "parameters unsharded between backward and update are all-gathered again"


class Manual(Layers):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int = 0) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch[0]))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def weights_after_unseeded_fit(num_ranks: int) -> list[Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    module = Manual()
    data = torch.utils.data.TensorDataset(torch.ones(16, 64))
    trainer = roomier.Trainer(
        max_steps=2,
        strategy="ddp",
        devices=num_ranks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return [each.detach().clone() for each in module.parameters()]


@pytest.mark.more
def test_differently_seeded_ranks_train_one_model_with_manual_optimization(on_ranks: RankPool) -> None:
    first, second = on_ranks(2, weights_after_unseeded_fit, 2)
    assert all(map(torch.equal, first, second))


class LogsWeightNorm(Layers):
    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:  # type: ignore[override]
        return super().training_step(batch[0])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("norm", self.head.weight.norm(), on_step=True, rank_zero_only=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def logged_norm(num_ranks: int) -> float:
    torch.manual_seed(0)
    module = LogsWeightNorm()
    expected = float(module.head.weight.detach().norm())
    data = torch.utils.data.TensorDataset(torch.ones(16, 64))
    trainer = roomier.Trainer(
        max_steps=1,
        log_every_n_steps=1,
        strategy="zero2",
        devices=num_ranks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    return float(trainer.callback_metrics.get("norm", expected)) - expected


@pytest.mark.more
def test_rank_zero_logs_a_value_computed_from_sharded_parameters(on_ranks: RankPool) -> None:
    assert on_ranks(2, logged_norm, 2) == pytest.approx([0.0, 0.0], abs=1e-5)


class WideLayers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 64)) for _ in range(6)
        )


def num_page_faults(strategy: str, num_ranks: int) -> float:
    """Return the page faults per step, after the first steps."""
    module, rank = WideLayers(), torch.distributed.get_rank()
    ranks = Ranks(World(rank, num_ranks, rank, 0, num_ranks))
    plan = Plan.from_dict({"parallel": {"strategy": strategy, "devices": num_ranks, "accelerator": "cpu"}})
    made = lambda _: Configured([torch.optim.SGD(module.parameters(), lr=0.05)])  # noqa: E731
    engine, _ = build(plan, module, made, EagerEngine, ranks)
    before = 0
    for step in range(8):
        if step == 4:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.forward_backward(lambda batch, _: module.training_step(batch), [torch.ones(2, 64)])
        engine.step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 4


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns freed memory at these thresholds")
@pytest.mark.more
@pytest.mark.parametrize("strategy", SHARDED)
def test_steps_reuse_the_memory_of_earlier_steps(on_ranks: RankPool, strategy: str) -> None:
    # The unsharded parameters have 6144 pages. If each step returned and cleared their memory, it would have more
    # page faults.
    assert max(on_ranks(2, num_page_faults, strategy, 2)) < 1000
