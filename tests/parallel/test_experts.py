"""Tests that mixtures of experts, in which ranks and steps use different experts, train as in one process."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.parity import Batch, Setup, batches_of, distance, train_bare, train_on_ranks
from tests.parallel.test_shapes import WIDTH, Mean, Regression
from tests.ranks.pool import RankFailed, RankPool

NUM_EXPERTS = 5
NEVER = NUM_EXPERTS - 1  # this expert receives no tokens
OPTION = {"find_unused_parameters": True}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 3), nn.LayerNorm(3), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.norm(torch.tanh(self.up(x))))
        return y


class Experts(nn.Module):
    """Top-1 routing over a ``ModuleList``. Experts without tokens do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        scores = self.gate(x).softmax(dim=-1)
        y = x
        for number, expert in enumerate(self.experts):
            rows = (route == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * scores[rows][..., number, None])
        return y


class Routed(Regression):
    """Module whose experts are units. In each step, the samples use only two or three of the experts."""

    num_layers = 1
    mean_at = 0

    def make_network(self) -> nn.Module:
        layers = [Experts() for _ in range(self.num_layers)]
        return nn.ModuleDict(
            {
                "first": nn.Linear(WIDTH, WIDTH),
                "layers": nn.ModuleList(layers),
                "mean": Mean(),
                "head": nn.Linear(WIDTH, 1),
            }
        )

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        batch = super().make_batch(num_samples, generator)
        allowed = torch.randperm(NEVER, generator=generator)[: 1 + int(torch.randint(3, (), generator=generator))]
        route = allowed[torch.randint(len(allowed), (num_samples,), generator=generator)]
        return {**batch, "route": route}

    def loss(self, batch: Batch) -> Tensor:
        assert isinstance(self.network, nn.ModuleDict)
        x = self.network["first"](batch["x"])
        for layer in self.network["layers"]:
            x = layer(x, batch["route"])
        return nn.functional.mse_loss(self.network["head"](self.network["mean"](x)), batch["y"])


class RoutedInLayers(Routed):
    """Module whose units are layers that contain experts."""

    num_layers = 2


STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
HSDP = {"strategy": "hsdp", "shard_size": 2}


def setup_of(num_ranks: int, **changes: Any) -> Setup:
    plain = Setup("ddp", num_ranks, accumulate=2, micro_batch=1, precision="64-true", clip=0.1, num_steps=12)
    return replace(plain, options=OPTION, **changes)


def check_experts(on_ranks: RankPool, calls: list[tuple[type[Routed], Setup]]) -> None:
    num_ranks = calls[0][1].num_ranks
    bare = {task: train_bare(task, setup_of(num_ranks)) for task, _ in calls}
    for (task, setup), [trained, *_] in zip(calls, on_ranks.each(num_ranks, train_on_ranks, calls), strict=True):
        apart = distance(trained, bare[task])
        assert max(apart.losses, apart.norms, apart.weights) < 1e-10, (task.__name__, setup.strategy, apart)


def test_experts_train_as_in_one_process(on_ranks: RankPool) -> None:
    of_units = [(Routed, setup_of(2, strategy=each)) for each in ("ddp", "zero3")]
    check_experts(on_ranks, [*of_units, (RoutedInLayers, setup_of(2, strategy="zero2"))])


@pytest.mark.more
def test_experts_with_other_strategies(on_ranks: RankPool) -> None:
    of_units = [(Routed, setup_of(2, strategy=each)) for each in ("zero1", "zero2")]
    check_experts(on_ranks, [*of_units, (RoutedInLayers, setup_of(2, strategy="zero3"))])


@pytest.mark.more
def test_experts_with_replicas(on_ranks: RankPool) -> None:
    check_experts(on_ranks, [(Routed, setup_of(4, **HSDP))])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_strategies(on_ranks: RankPool, num_ranks: int) -> None:
    changes: list[dict[str, Any]] = [*({"strategy": each} for each in STRATEGIES), *([HSDP] if num_ranks == 4 else [])]
    tasks = (Routed, RoutedInLayers)
    check_experts(on_ranks, [(task, setup_of(num_ranks, **each)) for task in tasks for each in changes])


def test_batches_leave_experts_without_tokens() -> None:
    """On one rank only, on all ranks, and in no step of the run."""
    setup = setup_of(2)
    used = [
        [{int(each) for part in parts for each in part["route"]} for parts in of_ranks]
        for of_ranks in batches_of(Routed(), setup)
    ]
    for expert in range(NEVER):
        on_one = [len({expert in own for own in of_ranks}) == 2 for of_ranks in used]
        on_none = [not any(expert in own for own in of_ranks) for of_ranks in used]
        assert any(on_one), expert
        assert any(on_none), expert
    assert all(NEVER not in own for of_ranks in used for own in of_ranks)


class AllInFirstStep(RoutedInLayers):
    """Module whose samples use all experts in the first step, and other experts on each rank in later steps."""

    def __init__(self) -> None:
        super().__init__()
        self.is_first = True

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        batch = super().make_batch(num_samples, generator)
        route = torch.arange(num_samples)
        batch["route"] = route % NUM_EXPERTS if self.is_first else (route // NUM_EXPERTS) % NUM_EXPERTS
        self.is_first = False
        return batch


@pytest.mark.more
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_gradients_on_a_rank_raise_on_all_ranks(on_ranks: RankPool, strategy: str, accumulate: int) -> None:
    setup = Setup(strategy, 2, accumulate=accumulate, micro_batch=NUM_EXPERTS, clip=0.1)
    check_raises(on_ranks, AllInFirstStep, setup, r"training_step=\['network.layers.\d.experts.\d.*")


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_other_units_on_a_rank_raise_on_all_ranks(on_ranks: RankPool, strategy: str) -> None:
    check_raises(on_ranks, Routed, Setup(strategy, 2, clip=0.1), r"training_step=\['network.layers.0.experts.\d.*")


@pytest.mark.more
def test_other_gradients_in_a_replica_raise_on_all_ranks(on_ranks: RankPool) -> None:
    """The ranks of a replica have the same samples, so that only the reduction between replicas differs."""
    setup = Setup("hsdp", 4, shard_size=2, micro_batch=NUM_EXPERTS)
    check_raises(on_ranks, AlikeInReplica, setup, r"training_step=\['network.layers.\d.experts.\d.*")


class AlikeInReplica(AllInFirstStep):
    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        batch = super().make_batch(num_samples, generator)
        batch["route"] = torch.zeros(num_samples, dtype=torch.int64)
        batch["route"][num_samples // 2 :] = 1
        return batch


def check_raises(on_ranks: RankPool, task: type[Routed], setup: Setup, match: str) -> None:
    with pytest.raises(RankFailed) as failed:
        on_ranks(setup.num_ranks, train_on_ranks, task, setup)
    assert sorted(failed.value.reports) == list(range(setup.num_ranks)), failed.value
    for report in failed.value.reports.values():
        assert re.search(rf"TrainingError: {match}find_unused_parameters", report), report
