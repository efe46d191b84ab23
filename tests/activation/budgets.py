"""Train a model within a budget, and measure the memory and the number of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from roomier import Module
from roomier.core.ranks import Ranks
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.planner.memory.tracker import tracking
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.budget import BudgetedRecompute

Budget = float | int | str | None
NUM_STEPS = 5  # the budget applies from the third step


class Net(Module):
    """Module that wraps ``network`` and returns its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any) -> Tensor:
        loss: Tensor = self.network(*batch)
        return loss


class Language(nn.Module):
    """GPT whose memory in a step consists mainly of activations."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 31, "context": 32, "num_layers": 8, "num_heads": 2, "width": 32, "dropout": 0.1}
        self.gpt = GPT(GPTConfig(**{**sizes, **changes}))

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.gpt(tokens[:, :-1], tokens[:, 1:])[1]
        return loss


def tokens(num_samples: int = 16, vocab_size: int = 31, seed: int = 0) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(vocab_size, (num_samples, 33), generator=generator),)


@dataclass
class Taken:
    """Measurements and results of a training run.

    Attributes:
        peak_bytes: measured peak bytes of all tensors in the last step.
        flops: number of operations in the last step.
    """

    peak_bytes: int
    predicted_bytes: int | None
    lost_ns: int | None
    flops: int
    losses: list[float]
    weights: dict[str, Tensor]
    keeps: list[Keep] = field(default_factory=list)


def engine_for(module: Module, budget: Budget, ranks: Ranks | None = None, **keywords: Any) -> EagerEngine:
    plan = plan_from_flags(
        accelerator=keywords.pop("accelerator", "cpu"),
        optimizer={"name": "adamw", "lr": 1e-3},
        activation_checkpointing=budget,
        **keywords,
    )
    engine, _ = build(
        plan, module, lambda blocks: configure(plan, module, lambda: NUM_STEPS, blocks), EagerEngine, ranks or Ranks()
    )
    return engine


def train(network: nn.Module, budget: Budget, windows: Sequence[Sequence[Any]], **keywords: Any) -> Taken:
    """Train one step for each of ``windows``, then measure two more steps with the last window."""
    module = Net(network)
    engine = engine_for(module, budget, **keywords)
    torch.manual_seed(1)
    losses = [take_step(engine, module, window) for window in windows]
    weights = {name: each.clone() for name, each in network.state_dict().items()}
    peak_bytes = measured_peak(engine, module, windows[-1])
    with FlopCounterMode(display=False) as counter:
        take_step(engine, module, windows[-1])
    taken = Taken(peak_bytes, None, None, counter.get_total_flops(), losses, weights)
    recompute = recompute_of(engine)
    if isinstance(recompute, BudgetedRecompute):
        taken.predicted_bytes, taken.lost_ns = recompute.predicted_bytes, recompute.lost_ns
        taken.keeps = [block.keep for block in recompute.blocks]
    engine.close()
    return taken


def take_step(engine: EagerEngine, module: Module, window: Sequence[Any]) -> float:
    loss = engine.forward_backward(lambda batch, _: module.training_step(batch), window)
    engine.step()
    assert loss is not None
    return loss.item()


def measured_peak(engine: EagerEngine, module: Module, window: Sequence[Any]) -> int:
    """Return the peak of a second step. The first step determines the memory before the step."""
    with tracking(engine) as tracker:
        for _ in range(2):
            tracker.restart()
            tracker.enter("forward")
            engine.forward_backward(lambda batch, _: module.training_step(batch), window)
            tracker.enter("update")
            engine.step()
    return tracker.peak().total()


def recompute_of(engine: EagerEngine) -> Any:
    return engine.levers.recompute


def assert_same_training(first: Taken, second: Taken) -> None:
    assert first.losses == second.losses
    for name, each in first.weights.items():
        assert torch.equal(each, second.weights[name]), name


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's correlation: Pearson's correlation of the ranks, with mean ranks for equal values."""

    def ranks(values: Sequence[float]) -> Tensor:
        given = torch.tensor(values, dtype=torch.float64)
        return (given[:, None] > given).sum(1) + ((given[:, None] == given).sum(1) - 1) / 2

    return torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1].item()
