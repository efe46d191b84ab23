"""Adafactor on sharded parameters equals torch's Adafactor on unsharded parameters, with the same states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from roomier import Module, Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.core.device.rng import seed_everything
from roomier.techniques.optim.adafactor import Adafactor
from tests.covering import covering, few
from tests.memory.test_model_states import check_formula
from tests.optim.test_adamw_on_ranks import States
from tests.parallel.parity import Batch, Setup, Task, distance, train_bare, train_on_ranks
from tests.ranks.pool import RankPool

SHAPES = [(13, 6), (7,), (4, 3, 5), (1, 5), (5, 1), (2, 1, 3, 3), ()]
SIDE = 6


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True, "eps": (1e-4, 1e-2), "d": 2.0}])
def test_steps_equal_torchs(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]
    ours = [nn.Parameter(each.detach().clone()) for each in theirs]
    optimizers = [Adafactor(ours, lr=0.03, **options), torch.optim.Adafactor(theirs, lr=0.03, **options)]
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = other.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.step()
    # Some sums of at most 18 terms have a different order, in each of 5 steps.
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
        mine, yours = (dict(optimizers[i].state[each]) for i, each in enumerate((one, other)))
        assert mine.keys() == yours.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, yours[key], rtol=1e-13, atol=1e-15)


# ---- several ranks ---------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Parameters with 0 to 4 dimensions, including a matrix with one row, and numbers of rows that 2 and 4 do not
    divide."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(1, 3, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(48, 51), nn.ReLU(), nn.Linear(51, 48)) for _ in range(2)])
        self.one = nn.Linear(48, 1)
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.view(-1, 1, SIDE, SIDE)).flatten(1)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.scale * self.head(x) + self.one(x) * torch.arange(3)
        return logits


class Classes(Task):
    """A classifier of points."""

    def make_network(self) -> nn.Module:
        return Layers()

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        x = torch.randn(num_samples, SIDE * SIDE, generator=generator)
        return {"x": x, "labels": (x[:, :3] + x[:, 3:6]).argmax(1)}

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.network(batch["x"]), batch["labels"])


LAYOUTS = [("zero3", 2, None), ("zero1", 2, None), ("zero2", 2, None), ("ddp", 2, None), ("hsdp", 4, 2)]
LAYOUTS += [("zero1", 4, None), ("zero3", 4, None), ("single", 1, None)]


@pytest.mark.parametrize("layout", few(map(pytest.param, LAYOUTS)), ids=lambda layout: f"{layout[0]} on {layout[1]}")
def test_ranks_train_as_a_plain_loop(on_ranks: RankPool, layout: tuple[str, int, int | None]) -> None:
    strategy, num_ranks, shard_size = layout
    common = {"precision": "64-true", "optimizer": "adafactor", "clip": 0.5, "num_steps": 6}
    setup = Setup(strategy, num_ranks, shard_size, micro_batch=8 // num_ranks, **common)  # type: ignore[arg-type]
    bare = train_bare(Classes, setup)
    for trained in on_ranks(num_ranks, train_on_ranks, Classes, setup):
        apart = distance(trained, bare)
        assert apart.losses < 1e-10, apart
        assert apart.weights < 1e-10, apart
    for name, before in Classes().named_parameters():
        assert (bare.weights[name] - before).abs().max() > 1e-3 * before.abs().max(), name


LEVERS = {
    "disk": {"offload": {"optimizer_states": "disk"}},
    "speculative": {"offload": {"optimizer_states": "disk", "update": "speculative"}},
    "backward": {"step_in_backward": True},
}


@pytest.mark.parametrize(("strategy", "lever"), few(covering(["zero2", "zero3"], list(LEVERS))))
def test_states_can_leave_the_device_and_updates_can_run_in_backward(
    on_ranks: RankPool, strategy: str, lever: str
) -> None:
    common = {"micro_batch": 4, "optimizer": "adafactor", "clip": 0.5, "num_steps": 4, "precision": "64-true"}
    setups = [Setup(strategy, 2, levers=levers, **common) for levers in ({}, LEVERS[lever])]  # type: ignore[arg-type]
    plain, moved = on_ranks.each(2, train_on_ranks, [(Classes, setup) for setup in setups])
    # Sums over ranks can be combined in messages of different sizes, in which gloo adds values in a different order.
    assert distance(plain[0], moved[0]).weights < 1e-12


@pytest.mark.more
@pytest.mark.parametrize(("strategy", "num_ranks"), [("zero1", 2), ("zero3", 3)])
def test_forecast_equals_the_measured_bytes(on_ranks: RankPool, strategy: str, num_ranks: int) -> None:
    check_formula(on_ranks, strategy, num_ranks, [("32-true", False, 1, {"name": "adafactor"})])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Classifier(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0]), batch[1])


def train(folder: Path, strategy: str, num_ranks: int, max_steps: int, path: str | None = None) -> dict[str, Any]:
    """Return the states of the optimizer at the start and at the end, and the last checkpoint."""
    seed_everything(0)
    batch = Classes().make_batch(64, torch.Generator().manual_seed(0))
    states, saver = States(), ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=max_steps,
        optimizer="adafactor",
        callbacks=[states, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(*batch.values()), batch_size=8 // num_ranks)
    trainer.fit(Classifier(), loader, ckpt_path=path)
    return {"states": states.found, "cut": states.cut, "path": saver.last_model_path or saver.best_model_path}


@pytest.mark.more
def test_states_are_bit_identical_on_2_then_1_then_4_ranks(on_ranks: RankPool, tmp_path: Path) -> None:
    before = None
    for index, (strategy, num_ranks) in enumerate([("zero2", 2), ("single", 1), ("zero3", 4), ("ddp", 2)]):
        path = None if before is None else before["path"]
        [first, *others] = on_ranks(num_ranks, train, tmp_path / str(index), strategy, num_ranks, 2 * index + 2, path)
        for states in [each["states"][-1] for each in others]:
            assert_same(first["states"][-1], states)
        if before is not None:
            assert_same(first["states"][0], before["states"][-1])
        if strategy.startswith("zero"):
            assert {"row_var", "col_var", "variance"} <= first["cut"]
        before = first


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert sum("row_var" in name for name in one) == 7
    for name, value in one.items():
        assert value.numel() == math.prod(value.shape)
        assert torch.equal(value, other[name]), name
