"""Parameters without a dimension, which nothing could cut, train under every strategy as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from roomier import Trainer
from tests.parallel.parity import Batch, Setup, Task, Trained, distance, train_bare, train_on_ranks, whole_weights
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


class InTurns(Scalars):
    """Samples decide which of the two numbers is used: others on other ranks, and some steps leave out one."""

    def predict(self, x: Tensor) -> Tensor:
        numbers = (self.network.temperature, self.network[0].alpha)
        number = numbers[int(x[0, 0, 0] > 0)]
        prediction: Tensor = self.network[4](x.mean(dim=1)) * number
        return prediction

    def make_network(self) -> nn.Module:
        network = super().make_network()
        for name, each in network.named_parameters():
            each.requires_grad_(name.startswith(("temperature", "0.alpha", "4.")))
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


def test_one_that_some_ranks_or_all_leave_out_of_a_step(on_ranks: RankPool) -> None:
    """Where no rank uses it, it has no gradient, and the optimizer passes it over as in one process."""
    setup = Setup("zero3", 2, num_steps=8, micro_batch=1)
    expected = train_bare(InTurns, setup, in_parts=True)
    for trained in on_ranks(2, train_on_ranks, InTurns, setup):
        apart = distance(trained, expected)
        assert max(apart.losses, apart.weights) < 1e-5, apart


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


class Fitted(Scalars):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=3e-3, eps=1e-3)


def fit(folder: Path, num_ranks: int, num_steps: int, *, is_resumed: bool = False) -> dict[str, Tensor]:
    """Weights, and what the optimizer keeps, by name; the run is saved in ``folder``."""
    module = Fitted()
    trainer = Trainer(
        default_root_dir=folder,
        strategy="zero3" if num_ranks > 1 else "single",
        devices=num_ranks,
        accelerator="cpu",
        max_steps=num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples = module.make_batch(8, torch.Generator().manual_seed(1))
    rows = [dict(zip(samples, row, strict=True)) for row in zip(*samples.values(), strict=True)]
    loader = DataLoader(cast(Any, rows), batch_size=4 // num_ranks)
    trainer.fit(module, loader, ckpt_path=folder / "saved" if is_resumed else None)
    if not is_resumed:
        trainer.save_checkpoint(folder / "saved")
    found = whole_weights(module)
    for name, parameter in module.named_parameters():
        for key, each in trainer.optimizers[0].state.get(parameter, {}).items():
            found[f"{name}: {key}"] = each.full_tensor() if isinstance(each, DTensor) else each.clone()
    return found


def saved_and_resumed(folder: Path) -> list[dict[str, Tensor]]:
    return [fit(folder / "whole", 2, 4), fit(folder, 2, 2), fit(folder, 2, 4, is_resumed=True)]


def test_a_checkpoint_holds_it_as_any_strategy_does(on_ranks: RankPool, tmp_path: Path) -> None:
    [(whole, saved, resumed), _] = on_ranks(2, saved_and_resumed, tmp_path)
    assert {"network.temperature: exp_avg", "network.0.alpha: step", "network.offset"} <= whole.keys()
    assert whole["network.temperature: exp_avg"].shape == ()
    for name, each in whole.items():
        assert torch.equal(resumed[name], each), name
    on_one = fit(tmp_path, 1, 2, is_resumed=True)  # nothing is left to train
    assert on_one.keys() == saved.keys()
    for name, each in saved.items():
        assert torch.equal(on_one[name], each), name
