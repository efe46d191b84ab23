"""A resume requires no more memory than training. No rank ever has the full model or all optimizer states."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roomier import Module, Trainer
from roomier.core.device.rng import seed_everything
from roomier.core.host_memory import give_back_freed
from tests.covering import few
from tests.ranks.pool import RankPool

MIB = 2**20
WIDTH, NUM_LAYERS = 1024, 8
WEIGHT_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4
STATE_BYTES = 2 * WEIGHT_BYTES  # two states of AdamW


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class Deep(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def memory_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


def reset_peak() -> None:
    gc.collect()
    give_back_freed()  # otherwise freed memory would be reused, and the process would not grow
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def train(folder: Path, strategy: str, num_ranks: int, max_steps: int, path: Path | None = None) -> dict[str, int]:
    """Return the memory growth of this rank during the restore, and the peaks during the restore and in training."""
    from roomier.train.opening import open_run

    seed_everything(0)
    restore, measured = open_run.restore, {"grown": 0, "restoring": 0}

    def measuring(run: Any, path: Path) -> None:
        reset_peak()
        before = memory_bytes("VmRSS")
        restore(run, path)
        measured["restoring"] = memory_bytes("VmHWM")
        measured["grown"] = measured["restoring"] - before
        reset_peak()

    open_run.restore = measuring
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))] * 20
    trainer.fit(Deep(), batches, ckpt_path=path)
    measured["training"] = memory_bytes("VmHWM")
    if path is None:
        trainer.save_checkpoint(folder / "saved")
    return measured


@pytest.fixture(scope="module")
def saved(on_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of one process and a checkpoint of two ranks."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("single", "zero3")}
    on_ranks(1, train, folders["single"], "single", 1, 1)
    on_ranks(2, train, folders["zero3"], "zero3", 2, 1)
    return {name: folder / "saved" for name, folder in folders.items()}


@pytest.mark.parametrize("of", few(["zero3", "single"]))
def test_two_ranks_read_only_their_shards(of: str, saved: dict[str, Path], on_ranks: RankPool, tmp_path: Path) -> None:
    for measured in on_ranks(2, train, tmp_path, "zero3", 2, 2, saved[of]):
        # The weights are already allocated. In addition to the states, reading requires a small buffer.
        assert STATE_BYTES / 2 < measured["grown"] < STATE_BYTES / 2 + 12 * MIB < STATE_BYTES
        assert measured["restoring"] <= measured["training"]


@pytest.mark.more
def test_one_process_reads_a_checkpoint_of_two_ranks_without_a_second_copy(
    saved: dict[str, Path], on_ranks: RankPool, tmp_path: Path
) -> None:
    [measured] = on_ranks(1, train, tmp_path, "single", 1, 2, saved["zero3"])
    assert STATE_BYTES < measured["grown"] < STATE_BYTES + 12 * MIB
    assert measured["restoring"] <= measured["training"]
