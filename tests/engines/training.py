"""The training that the tests of engines run: its ranks note their samples, and fail as the test requires."""

import json
import os
import random
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import roomier

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
        with (self.notes / f"samples-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.trainer.current_epoch, step, indices.tolist()]) + "\n")
        loss = (self.net(values) - indices[:, None] / NUM_SAMPLES).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.05)


class Kill:
    """Send SIGKILL to a random rank in each of the first ``number`` attempts: at a random moment during or shortly
    after a random step.

    Args:
        notes: folder in which the attempts are counted.
        number: number of kills.
        within: maximum number of steps of an attempt before its kill.
    """

    def __init__(self, notes: Path, number: int, within: int) -> None:
        self.notes, self.number, self.within = notes, number, within
        self.num_steps = 0

    def __call__(self, rank: int, step: int) -> None:
        if self.num_steps == 0:
            self.attempt = len(list(self.notes.glob(f"attempt-{rank}-*")))
            (self.notes / f"attempt-{rank}-{self.attempt}").touch()
            draw = random.Random(self.attempt)
            self.victim, self.kill_after, self.delay_s = draw.randrange(2), draw.randrange(self.within), draw.random()
        if self.attempt < self.number:
            if self.num_steps == self.kill_after and rank == self.victim:
                threading.Timer(0.05 * self.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(0.03)
        self.num_steps += 1


def train(notes: Path, max_epochs: int, before_step: Any, dropout: float, num_ranks: int, **options: Any) -> None:
    """Train on ``num_ranks`` ranks with the same global batch, and write the final weights to ``notes``."""
    roomier.seed_everything(0)
    trainer = roomier.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        strategy="ddp" if num_ranks > 1 else "single",
        logger=False,
        enable_progress_bar=False,
        enable_plan_table=False,
        enable_model_summary=False,
        **options,
    )
    model = Model(notes, before_step, dropout)
    trainer.fit(model, DataLoader(Numbered(), GLOBAL_BATCH // num_ranks, shuffle=True))
    if trainer.is_global_zero:
        torch.save([trainer.global_step, model.state_dict()], notes / "end.pt")


def undisturbed(notes: Path, max_epochs: int, dropout: float = 0.0) -> None:
    """Train on the ranks of a pool, without an engine."""
    train(notes, max_epochs, None, dropout, int(os.environ["WORLD_SIZE"]), default_root_dir=notes / "runs")


def samples_of(notes: Path) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each (epoch, step), and check that all executions of a step read the same samples and that
    each epoch reads each sample once."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for path in notes.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            epoch, step, indices = json.loads(line)
            found[epoch, step] |= set(indices)
    assert {len(indices) for indices in found.values()} == {GLOBAL_BATCH}
    for epoch in {epoch for epoch, _ in found}:
        read = sorted(index for (each, _), indices in found.items() if each == epoch for index in indices)
        assert read == list(range(NUM_SAMPLES))
    return {key: sorted(indices) for key, indices in found.items()}
