"""AdamW with 8-bit and 4-bit states under every strategy equals one process, also after checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from roomier import Callback, Module, Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.core.device.rng import seed_everything
from tests.covering import covering, few
from tests.parallel.parity import Batch, Setup, Task, Trained, distance, train_on_ranks
from tests.ranks.pool import RankPool

NAMES = ["adamw8bit", "adamw4bit"]
LAYOUTS = [("ddp", 2, None), ("zero1", 2, None), ("zero2", 2, None), ("zero3", 2, None), ("hsdp", 4, 2)]
NUM_STEPS, STOPS_AT, GLOBAL_BATCH = 6, 3, 8


class Layers(nn.Module):
    """Module whose optimizer states are quantized. No number of ranks divides the rows of some matrices, and one matrix
    has 3 rows, so one of 4 ranks owns no row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(83, 51), nn.ReLU(), nn.Linear(51, 83)) for _ in range(2)])
        self.wide, self.narrow = nn.Linear(83, 1500), nn.Linear(1500, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.narrow(self.wide(x).relu())
        return logits


class Classes(Task):
    """A classifier of points."""

    def make_network(self) -> nn.Module:
        return Layers()

    def make_batch(self, num_samples: int, generator: torch.Generator) -> Batch:
        x = torch.randn(num_samples, 83, generator=generator)
        return {"x": x, "labels": (x[:, :3] + x[:, 3:6]).argmax(1)}

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.network(batch["x"]), batch["labels"])


@cache
def on_one_rank(pool: RankPool, optimizer: str, precision: str = "32-true", clip: float | None = None) -> Trained:
    setup = Setup(
        "single", 1, micro_batch=GLOBAL_BATCH, optimizer=optimizer, precision=precision, clip=clip, num_steps=12
    )
    trained: Trained = pool(1, train_on_ranks, Classes, setup)[0]
    return trained


@pytest.mark.parametrize(("layout", "optimizer"), few(covering(LAYOUTS[1:] + LAYOUTS[:1], NAMES), 2))
def test_ranks_train_as_one_process(on_ranks: RankPool, optimizer: str, layout: tuple[str, int, int | None]) -> None:
    """The order of sums changes the last bit of a gradient, which can select the adjacent code. This affects one of
    several thousand codes. In most of these runs, no code is affected, and the results agree as closely as in
    float32."""
    strategy, num_ranks, shard_size = layout
    micro_batch = GLOBAL_BATCH // num_ranks
    setup = Setup(strategy, num_ranks, shard_size, micro_batch=micro_batch, optimizer=optimizer, clip=0.5, num_steps=12)
    single = on_one_rank(on_ranks, optimizer, clip=0.5)
    for trained in on_ranks(num_ranks, train_on_ranks, Classes, setup):
        apart = distance(trained, single)
        assert apart.losses < 1e-3, apart
        assert apart.weights < 1e-3, apart
    assert single.losses[-1] < 0.9 * single.losses[0], "nothing was learned"


@pytest.mark.more
def test_in_bf16_mixed_losses_are_near(on_ranks: RankPool) -> None:
    setup = Setup("zero2", 2, micro_batch=GLOBAL_BATCH // 2, precision="bf16-mixed", num_steps=12)
    results = on_ranks.each(2, train_on_ranks, [(Classes, replace(setup, optimizer=name)) for name in NAMES])
    for name, by_rank in zip(NAMES, results, strict=True):
        single = on_one_rank(on_ranks, name, "bf16-mixed")
        for trained in by_rank:
            assert trained.losses == pytest.approx(single.losses, rel=1e-2), name


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Points(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = Classes.make_batch(self, 1, torch.Generator().manual_seed(index))  # type: ignore[arg-type]
        return {name: value[0] for name, value in batch.items()}


class Classifier(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch["x"]), batch["labels"])


class States(Callback):
    """Record unsharded optimizer states and weights at the start and the end of training."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []
        self.cut: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._add(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._add(trainer, pl_module)

    def _add(self, trainer: Trainer, pl_module: Module) -> None:
        [optimizer] = trainer.optimizers
        found: dict[str, Tensor] = {}
        for name, parameter in pl_module.named_parameters():
            found[name] = self._whole(parameter, name)
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}: {key}"] = self._whole(value, key)
        self.found.append(found)

    def _whole(self, tensor: Tensor, name: str) -> Tensor:
        if hasattr(tensor, "full_tensor"):
            self.cut.add(name)
            tensor = (tensor.int() if tensor.dtype is torch.int16 else tensor).full_tensor()  # gloo gathers no int16
        return tensor.detach().clone()


def train(
    folder: Path, optimizer: str, precision: str, strategy: str, num_ranks: int, max_steps: int, path: str | None = None
) -> dict[str, Any]:
    """Return the states of the optimizer on each rank, and the last checkpoint."""
    seed_everything(0)
    states, saver = States(), ModelCheckpoint(every_n_train_steps=STOPS_AT, save_top_k=-1)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        precision=precision,
        max_steps=max_steps,
        optimizer=optimizer,
        learning_rate=1e-3,
        callbacks=[states, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Points(), batch_size=GLOBAL_BATCH // num_ranks, shuffle=True, drop_last=True)
    trainer.fit(Classifier(), loader, ckpt_path=path)
    return {"states": states.found, "cut": states.cut, "path": saver.last_model_path or saver.best_model_path}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert any("codes" in name for name in one)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.more
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    few(
        [
            ("adamw8bit", "32-true"),
            pytest.param("adamw4bit", "32-true", marks=pytest.mark.slow),
            ("adamw4bit", "bf16-true"),
        ]
    ),
)
def test_states_are_bit_identical_on_2_then_1_then_4_ranks(
    on_ranks: RankPool, tmp_path: Path, optimizer: str, precision: str
) -> None:
    layouts = [("zero2", 2), ("single", 1), ("zero3", 4)]
    before = None
    for index, (strategy, num_ranks) in enumerate(layouts):
        folder, path = tmp_path / str(index), None if before is None else before["path"]
        steps = STOPS_AT * (index + 1)
        [first, *others] = on_ranks(num_ranks, train, folder, optimizer, precision, strategy, num_ranks, steps, path)
        for other in others:
            assert_same(first["states"][-1], other["states"][-1])
        if before is not None:
            assert_same(first["states"][0], before["states"][-1])
        if num_ranks > 1:
            assert {"root_scales", "ratio_scales"} <= first["cut"], "no rank holds more than its rows"
        before = first


@pytest.mark.parametrize(("layout", "optimizer"), few(covering([("single", 1), ("zero3", 2)], NAMES)))
def test_a_stopped_run_resumes_bit_for_bit(
    on_ranks: RankPool, tmp_path: Path, optimizer: str, layout: tuple[str, int]
) -> None:
    strategy, num_ranks = layout
    common = (optimizer, "32-true", strategy, num_ranks)
    whole = on_ranks(num_ranks, train, tmp_path / "whole", *common, NUM_STEPS)[0]
    half = on_ranks(num_ranks, train, tmp_path / "half", *common, STOPS_AT)[0]
    ended = on_ranks(num_ranks, train, tmp_path / "rest", *common, NUM_STEPS, half["path"])[0]
    assert_same(ended["states"][-1], whole["states"][-1])
