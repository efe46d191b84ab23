"""Training of a model on several ranks and in a plain PyTorch loop, and the distance between the results."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from roomier import Module
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.plan import Plan, plan_from_flags

Batch = dict[str, Tensor]


class Task(Module):
    """A network and its training batches. The first dimension of a batch is the sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = self.make_network()

    def make_network(self) -> nn.Module:
        raise NotImplementedError

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean over the loss terms of ``batch``, or their sum."""
        raise NotImplementedError

    def count_terms(self, batch: Batch) -> int:
        """Return the number of loss terms of ``batch``, computed independently of roomier."""
        return int((batch["labels"] != -100).sum())

    def training_step(self, batch: Batch) -> Tensor:
        return self.loss(batch)


@dataclass(frozen=True)
class Setup:
    """Training settings, for several ranks and for the plain loop.

    Args:
        terms: ``"all"``; ``"some"``, which ignores random targets; or ``"none on one"``, which additionally ignores all
            targets of the last micro-batch of the last rank.
        options: further fields of the strategy.
        levers: further keywords of ``plan_from_flags``.
    """

    strategy: str = "zero2"
    num_ranks: int = 2
    shard_size: int | None = None
    accumulate: int = 1
    micro_batch: int = 2
    precision: str = "32-true"
    clip: float | None = None
    clip_algorithm: str = "norm"
    optimizer: str = "adamw"
    terms: str = "all"
    num_steps: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    levers: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        strategy = {"name": self.strategy, **({"shard_size": self.shard_size} if self.shard_size else {})}
        return plan_from_flags(
            strategy={**strategy, **self.options} if self.num_ranks > 1 else "single",
            accelerator="cpu",
            devices=self.num_ranks,
            precision=self.precision,
            accumulate_grad_batches=self.accumulate,
            gradient_clip_val=self.clip,
            gradient_clip_algorithm=self.clip_algorithm,
            optimizer=OPTIMIZERS.get(self.optimizer, {"name": self.optimizer, "lr": 1e-3}),
            **self.levers,
        )


# Adam divides by the magnitude of a gradient. This amplifies rounding errors in gradients that would otherwise be
# exactly zero, such as the gradient of attention's key bias. An eps far above these errors keeps equal runs comparable.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 3e-3, "eps": 1e-3},
    "sgd": {"name": "sgd", "lr": 0.003, "momentum": 0.9},
    "adafactor": {"name": "adafactor", "lr": 0.01},
}


@dataclass
class Trained:
    """Result of a training run: the loss and gradient norm of each step, and the final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def batches_of(task: Task, setup: Setup) -> list[list[list[Batch]]]:
    """Return the batches as ``[step][rank][micro-batch]``."""
    generator = torch.Generator().manual_seed(1)
    num_parts = setup.num_ranks * setup.accumulate
    steps = []
    for _ in range(setup.num_steps):
        whole = task.make_batch(num_parts * setup.micro_batch, generator)
        if setup.terms != "all":
            ignored = torch.rand(whole["labels"].shape, generator=generator) < 0.4
            ignored.view(-1)[0] = False  # a step without any loss term is an error
            if setup.terms == "none on one" and num_parts > 1:
                ignored[-setup.micro_batch :] = True
            whole["labels"] = whole["labels"].masked_fill(ignored, -100)
        parts = [
            dict(zip(whole, values, strict=True))
            for values in zip(*(value.chunk(num_parts) for value in whole.values()), strict=True)
        ]
        steps.append([parts[rank :: setup.num_ranks] for rank in range(setup.num_ranks)])
    return steps


def joined(parts: Sequence[Batch]) -> Batch:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def train_bare(make_task: Callable[[], Task], setup: Setup, *, in_parts: bool = False) -> Trained:
    """Train in a plain PyTorch loop, in one process and with one batch per step.

    Args:
        in_parts: True to accumulate gradients over the micro-batches of all ranks instead.
    """
    task = make_task()
    bare = copy.deepcopy(task)
    dtype = torch.float64 if setup.precision == "64-true" else torch.float32
    bare.to(dtype)
    optimizer = bare_optimizer(setup.optimizer, bare)
    trained = Trained([], [], {})
    for parts_of_ranks in batches_of(task, setup):
        parts = [part for micro in zip(*parts_of_ranks, strict=True) for part in micro]
        batches = parts if in_parts else [joined(parts)]
        num_terms = sum(map(task.count_terms, batches))
        optimizer.zero_grad()
        trained.losses.append(0.0)
        for batch in batches:
            weight = 1.0 if task.loss_reduction == "sum" else task.count_terms(batch) / num_terms
            if not weight:
                continue
            batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=setup.precision == "bf16-mixed"):
                loss = bare.loss(batch) * weight
            loss.backward()
            trained.losses[-1] += loss.item()
        if setup.clip is not None and setup.clip_algorithm == "value":
            nn.utils.clip_grad_value_(bare.parameters(), setup.clip)
        elif setup.clip is not None:
            trained.norms.append(nn.utils.clip_grad_norm_(bare.parameters(), setup.clip).item())
        optimizer.step()
    trained.weights = {name: each.detach() for name, each in bare.named_parameters()}
    return trained


def bare_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    # As in the optimizers of a Plan, weight decay applies to parameters with two or more dimensions, except the bias
    # table of T5.
    options = {key: value for key, value in OPTIMIZERS[name].items() if key != "name"}
    trained = {key: each for key, each in module.named_parameters() if each.requires_grad}
    if name in ("sgd", "adafactor"):
        kind: Any = torch.optim.SGD if name == "sgd" else torch.optim.Adafactor
        made: torch.optim.Optimizer = kind(trained.values(), **options)
        return made
    decaying = [each for key, each in trained.items() if each.dim() >= 2 and "bias" not in key]
    others = [each for key, each in trained.items() if each.dim() < 2 or "bias" in key]
    groups = [{"params": decaying, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], **options)


def train_on_ranks(make_task: Callable[[], Task], setup: Setup) -> Trained:
    """Train on each rank of a group. Return the losses of the global batch and the full weights."""
    task = make_task()
    engine, ranks = engine_of(task, setup.plan())
    trained = Trained([], [], {})
    for parts_of_ranks in batches_of(task, setup):
        loss = engine.forward_backward(lambda batch, _: task.training_step(batch), parts_of_ranks[ranks.world.rank])
        trained.losses.append(ranks.sum(loss.detach().double() if loss is not None else torch.zeros(1)).item())
        norm = engine.clip()
        if norm is not None:
            trained.norms.append(norm.item())
        engine.step()
    engine.settle()
    trained.weights = whole_weights(task)
    return trained


def engine_of(task: Module, plan: Plan) -> tuple[EagerEngine, Ranks]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert not dist.is_initialized() or dist.get_world_size() == size
    ranks = Ranks(World(rank, size, rank, 0, size))
    engine, _ = build(plan, task, lambda blocks: configure(plan, task, lambda: 1, blocks), EagerEngine, ranks)
    return engine, ranks


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in module.named_parameters()
    }


@dataclass(frozen=True)
class Distance:
    """Relative distances between two training runs: the maximum over losses, over norms, and over weight tensors.

    The root mean square of a weight tensor counts as at least 0.1, because a bias that starts at zero contains mostly
    rounding errors of its gradient.
    """

    losses: float
    norms: float
    weights: float
    worst: str


def distance(one: Trained, other: Trained) -> Distance:
    assert one.weights.keys() == other.weights.keys()
    assert len(one.losses) == len(other.losses)
    assert len(one.norms) == len(other.norms)
    apart = {
        name: ((one.weights[name] - weight).norm() / weight.norm().clamp(min=0.1 * weight.numel() ** 0.5)).item()
        for name, weight in other.weights.items()
    }
    worst = max(apart, key=lambda name: apart[name])
    return Distance(furthest(one.losses, other.losses), furthest(one.norms, other.norms), apart[worst], worst)


def furthest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max((abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours, theirs, strict=True)), default=0.0)
