"""Parameters without a dimension, which nothing could cut, train under every strategy as in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.parity import Setup, Task, Trained, distance, train_bare, train_on_ranks
from tests.parallel.test_shapes import WIDTH, Mean, Regression
from tests.ranks.pool import RankPool


class ReZero(nn.Module):
    """Bachlechner et al. 2020: a block whose part in the sum is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.3))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.alpha * self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Scalars(Regression):
    """One in each block, one that is a layer of its own, one of no layer, and one that is frozen."""

    def make_network(self) -> nn.Module:
        network = nn.Sequential(ReZero(), ReZero(), Mean(), Scale(), nn.Linear(WIDTH, 1))
        network.temperature = nn.Parameter(torch.tensor(0.7))
        network.offset = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        return network

    def predict(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x) * self.network.temperature.exp() + self.network.offset
        return prediction


class OnlyOneIsTrained(Scalars):
    def make_network(self) -> nn.Module:
        network = super().make_network()
        for name, each in network.named_parameters():
            each.requires_grad_(name == "temperature")
        return network


class NothingElse(Regression):
    """The model is one number."""

    def make_network(self) -> nn.Module:
        return Scale()

    def predict(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x.mean(dim=(1, 2)))[:, None]
        return prediction


class SharedByBlocks(Scalars):
    def make_network(self) -> nn.Module:
        network = super().make_network()
        network[1].alpha = network[0].alpha
        return network


TASKS = [Scalars, OnlyOneIsTrained, NothingElse, SharedByBlocks]


def train_each(cases: list[tuple[type[Task], Setup]]) -> list[Trained]:
    return [train_on_ranks(task, setup) for task, setup in cases]


def check(on_ranks: RankPool, cases: list[tuple[type[Task], Setup]]) -> None:
    num_ranks = cases[0][1].num_ranks
    [first, *others] = on_ranks(num_ranks, train_each, cases)
    for (task, setup), trained in zip(cases, first, strict=True):
        apart = distance(trained, train_bare(task, setup))
        assert max(apart.losses, apart.norms, apart.weights) < 1e-5, (task, setup, apart)
    for other in others:  # no rank goes its own way
        for ours, theirs in zip(first, other, strict=True):
            assert all(torch.equal(theirs.weights[name], each) for name, each in ours.weights.items())


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "shard_size"), [("zero1", 2, None), ("zero3", 2, None), ("hsdp", 4, 2)]
)
def test_a_parameter_without_a_dimension_is_trained_as_in_one_process(
    on_ranks: RankPool, strategy: str, num_ranks: int, shard_size: int | None
) -> None:
    setup = Setup(strategy, num_ranks, shard_size, accumulate=2, clip=0.05, num_steps=4)
    by_value = replace(setup, clip=0.01, clip_algorithm="value")
    unused = replace(setup, clip=None, options={"find_unused_parameters": True})
    check(on_ranks, [*((task, setup) for task in TASKS), (Scalars, by_value), (Scalars, unused)])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_its_update_in_the_backward_waits_for_the_gradients_of_all_ranks(on_ranks: RankPool, algorithm: str) -> None:
    clip = 0.05 if algorithm == "norm" else 0.01
    setup = Setup("zero3", 2, clip=clip, clip_algorithm=algorithm, num_steps=4, levers={"step_in_backward": True})
    check(on_ranks, [(Scalars, setup), (OnlyOneIsTrained, setup)])


def test_a_loss_scale_finds_what_is_infinite_in_either_kind(on_ranks: RankPool) -> None:
    """The first parameter of the optimizer has no dimension, and is the same on all ranks; the others are cut."""
    setup = Setup("zero2", 2, precision="16-mixed", num_steps=4)
    [[trained], [other]] = on_ranks(2, train_each, [(SharedByBlocks, setup)])
    assert all(torch.equal(other.weights[name], each) for name, each in trained.weights.items())
    expected = train_bare(SharedByBlocks, replace(setup, precision="32-true"))
    assert distance(trained, expected).losses < 0.2
    assert trained.weights["network.0.alpha"] != 0.3  # not all steps were left out
