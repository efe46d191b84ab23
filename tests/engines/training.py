"""The training that the tests of engines run: its ranks note their samples, and fail as the test requires."""

import json
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import roomier

few_or_ten_kills = pytest.mark.parametrize("num_kills", [2, pytest.param(10, marks=pytest.mark.slow)])

NUM_SAMPLES = 48
GLOBAL_BATCH = 8  # 6 steps per epoch


class Numbered(Dataset[Any]):
    """Samples that contain their index."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.linspace(index / NUM_SAMPLES, 1.0, 4), index


class Model(roomier.Module):
    """A model that notes the samples of each step in ``notes``. ``before_step`` receives the rank and the step."""

    def __init__(self, notes: Path, before_step: Any = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.notes, self.before_step = notes, before_step
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values, indices = batch
        rank, step = self.trainer.global_rank, self.trainer.global_step
        if self.before_step is not None:
            self.before_step(rank, step)
        losses = (self.net(values).squeeze(1) - indices / NUM_SAMPLES).pow(2)
        with (self.notes / f"samples-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.trainer.current_epoch, step, indices.tolist(), losses.tolist()]) + "\n")
        self.log("loss", losses.mean())
        return losses.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.05)


class Kill:
    """Send SIGKILL to a random rank in each of ``attempts``: at a random moment during or shortly after a random step.

    Args:
        notes: folder in which the attempts are counted.
        attempts: indices of the attempts that end with a kill.
        within: maximum number of steps of an attempt before its kill.
    """

    def __init__(self, notes: Path, attempts: Collection[int], within: int) -> None:
        self.notes, self.attempts, self.within = notes, attempts, within
        self.num_steps = 0

    def __call__(self, rank: int, step: int) -> None:
        if self.num_steps == 0:
            self.attempt = len(list(self.notes.glob(f"attempt-{rank}-*")))
            (self.notes / f"attempt-{rank}-{self.attempt}").touch()
            draw = random.Random(self.attempt)
            self.victim, self.kill_after, self.delay_s = draw.randrange(2), draw.randrange(self.within), draw.random()
        if self.attempt <= max(self.attempts):
            if self.attempt in self.attempts and self.num_steps == self.kill_after and rank == self.victim:
                threading.Timer(0.05 * self.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(0.03)
        self.num_steps += 1


class Slow:
    """Record the time and the number of ranks of each step in ``notes``, and delay it while ``notes/slow`` exists."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __call__(self, rank: int, step: int) -> None:
        if rank == 0:
            with (self.notes / "times.jsonl").open("a") as file:
                file.write(json.dumps([time.time(), int(os.environ["WORLD_SIZE"])]) + "\n")
        if (self.notes / "slow").exists():
            time.sleep(0.1)


def train(
    notes: Path,
    max_epochs: int,
    before_step: Any,
    dropout: float,
    num_ranks: int,
    strategy: str = "ddp",
    **options: Any,
) -> None:
    """Train on ``num_ranks`` ranks with the same global batch, and write the final weights to ``notes``."""
    roomier.seed_everything(0)
    trainer = roomier.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        strategy=strategy if num_ranks > 1 else "single",
        logger=False,
        enable_progress_bar=False,
        enable_plan_table=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Model(notes, before_step, dropout), DataLoader(Numbered(), GLOBAL_BATCH // num_ranks, shuffle=True))
    named = trainer.engine.weights()
    weights = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named.items()}
    if trainer.is_global_zero:
        torch.save([trainer.global_step, weights], notes / "end.pt")


def undisturbed(notes: Path, max_epochs: int, dropout: float = 0.0, strategy: str = "ddp") -> None:
    """Train on the ranks of a pool, without an engine."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    train(notes, max_epochs, None, dropout, num_ranks, strategy, default_root_dir=notes / "runs")


Steps = dict[tuple[int, int], dict[int, float]]


def steps_of(notes: Path, tolerance: float = 0.0) -> Steps:
    """Return the losses of the samples of each (epoch, step), by index. Check that all executions of a step read the
    same samples, with losses that differ by at most ``tolerance``, and that each epoch reads each sample once."""
    found: Steps = defaultdict(dict)
    for path in notes.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            epoch, step, indices, losses = json.loads(line)
            for index, loss in zip(indices, losses, strict=True):
                assert abs(found[epoch, step].setdefault(index, loss) - loss) <= tolerance, (epoch, step, index)
    assert {len(losses) for losses in found.values()} == {GLOBAL_BATCH}
    for epoch in {epoch for epoch, _ in found}:
        read = sorted(index for (each, _), losses in found.items() if each == epoch for index in losses)
        assert read == list(range(NUM_SAMPLES))
    return found


def check_same(notes: Path, expected: Path, tolerance: float = 0.0) -> None:
    """Check that the runs in ``notes`` and ``expected`` have the same samples, and losses and final weights that differ
    by at most ``tolerance``. Losses below 0.001 may differ by ``tolerance / 1000``."""
    found, expected_steps = steps_of(notes, tolerance), steps_of(expected)
    assert found.keys() == expected_steps.keys()
    for key, losses in found.items():
        assert losses.keys() == expected_steps[key].keys()
        loss, expected_loss = (sum(each.values()) / GLOBAL_BATCH for each in (losses, expected_steps[key]))
        assert abs(loss - expected_loss) <= tolerance * max(expected_loss, 1e-3), (key, loss, expected_loss)
    ends = [torch.load(each / "end.pt") for each in (notes, expected)]
    torch.testing.assert_close(*ends, rtol=tolerance, atol=tolerance)
