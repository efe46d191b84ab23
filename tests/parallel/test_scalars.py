"""Tests that under every strategy, parameters without a dimension are trained as in one process."""

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
from tests.covering import few
from tests.parallel.parity import Batch, Setup, Task, Trained, distance, train_bare, train_on_ranks, whole_weights
from tests.parallel.test_shapes import WIDTH, Mean, Regression
from tests.ranks.pool import RankPool


class ReZero(nn.Module):
    """A residual block with a learned weight (Bachlechner et al. 2020)."""

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
    """Module with scalars in each block, in a separate layer and in the root module, and with a frozen scalar."""

    def make_network(self) -> nn.Module:
        network = nn.Sequential(ReZero(), ReZero(), Mean(), Scale(), nn.Linear(WIDTH, 1))
        network.temperature = nn.Parameter(torch.tensor(0.7))
        network.offset = nn.Parameter(torch.tensor(0.1), requires_grad=False)
        return network

    def predict(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.network(x) * self.network.temperature.exp() + self.network.offset
        return prediction


class OneTrained(Scalars):
    def make_network(self) -> nn.Module:
        network = super().make_network()
        for name, each in network.named_parameters():
            each.requires_grad_(name == "temperature")
        return network


class OnlyScalar(Regression):
    """A model whose only parameter is a scalar."""

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


class Alternating(Scalars):
    """Module that uses one of two scalars, depending on the samples. Ranks use different scalars, and some steps leave
    one scalar unused."""

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


TASKS = [Scalars, OneTrained, OnlyScalar, SharedByBlocks]


def train_each(cases: list[tuple[type[Task], Setup]]) -> list[Trained]:
    return [train_on_ranks(task, setup) for task, setup in cases]


def check(on_ranks: RankPool, cases: list[tuple[type[Task], Setup]]) -> None:
    num_ranks = cases[0][1].num_ranks
    [first, *others] = on_ranks(num_ranks, train_each, cases)
    for (task, setup), trained in zip(cases, first, strict=True):
        apart = distance(trained, train_bare(task, setup))
        assert max(apart.losses, apart.norms, apart.weights) < 1e-5, (task, setup, apart)
    for other in others:  # all ranks have the same weights
        for ours, theirs in zip(first, other, strict=True):
            assert all(torch.equal(theirs.weights[name], each) for name, each in ours.weights.items())


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "shard_size"), few([("zero3", 2, None), ("zero1", 2, None), ("hsdp", 4, 2)])
)
def test_scalar_parameters_match_one_process(
    on_ranks: RankPool, strategy: str, num_ranks: int, shard_size: int | None
) -> None:
    setup = Setup(strategy, num_ranks, shard_size, accumulate=2, clip=0.05, num_steps=3)
    by_value = replace(setup, clip=0.01, clip_algorithm="value")
    unused = replace(setup, clip=None, options={"find_unused_parameters": True})
    check(on_ranks, [*((task, setup) for task in TASKS), (Scalars, by_value), (Scalars, unused)])


@pytest.mark.more
def test_scalar_unused_on_some_or_all_ranks(on_ranks: RankPool) -> None:
    """If no rank uses the scalar, it has no gradient and the optimizer skips it, as in one process."""
    setup = Setup("zero3", 2, num_steps=8, micro_batch=1)
    expected = train_bare(Alternating, setup, in_parts=True)
    for trained in on_ranks(2, train_on_ranks, Alternating, setup):
        apart = distance(trained, expected)
        assert max(apart.losses, apart.weights) < 1e-5, apart


@pytest.mark.parametrize("algorithm", few(["norm", "value"]))
def test_scalar_update_in_backward_uses_the_gradients_of_all_ranks(on_ranks: RankPool, algorithm: str) -> None:
    clip = 0.05 if algorithm == "norm" else 0.01
    setup = Setup("zero3", 2, clip=clip, clip_algorithm=algorithm, num_steps=4, levers={"step_in_backward": True})
    check(on_ranks, [(Scalars, setup), (OneTrained, setup)])


def test_loss_scale_detects_infinite_gradients_of_scalars_and_shards(on_ranks: RankPool) -> None:
    """The first parameter of the optimizer has no dimension and is identical on all ranks. The others are sharded."""
    setup = Setup("zero2", 2, precision="16-mixed", num_steps=4)
    [[trained], [other]] = on_ranks(2, train_each, [(SharedByBlocks, setup)])
    assert all(torch.equal(other.weights[name], each) for name, each in trained.weights.items())
    expected = train_bare(SharedByBlocks, replace(setup, precision="32-true"))
    assert distance(trained, expected).losses < 0.2
    assert trained.weights["network.0.alpha"] != 0.3  # not all steps were skipped


class Fitted(Scalars):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=3e-3, eps=1e-3)


def fit(folder: Path, num_ranks: int, num_steps: int, *, is_resumed: bool = False) -> dict[str, Tensor]:
    """Train, save in ``folder``, and return the weights and optimizer states."""
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


@pytest.mark.more
def test_checkpoint_with_scalars_resumes_under_any_strategy(on_ranks: RankPool, tmp_path: Path) -> None:
    [(whole, saved, resumed), _] = on_ranks(2, saved_and_resumed, tmp_path)
    assert {"network.temperature: exp_avg", "network.0.alpha: step", "network.offset"} <= whole.keys()
    assert whole["network.temperature: exp_avg"].shape == ()
    for name, each in whole.items():
        assert torch.equal(resumed[name], each), name
    on_one = fit(tmp_path, 1, 2, is_resumed=True)  # the run is complete
    assert on_one.keys() == saved.keys()
    for name, each in saved.items():
        assert torch.equal(on_one[name], each), name
