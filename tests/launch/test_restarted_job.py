"""A job that restarts with the same, a smaller or a larger number of ranks: the samples of each step, and the
weights."""

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import roomier
from roomier.callbacks import ModelCheckpoint
from tests.covering import few
from tests.engines.training import NUM_SAMPLES, Numbered
from tests.ranks.pool import RankFailed, RankPool

Steps = dict[tuple[int, int], set[int]]


class Model(roomier.Module):
    def __init__(self, notes: Path, killed_at: tuple[int, int] | None) -> None:
        super().__init__()
        self.notes, self.killed_at = notes, killed_at
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values, indices = batch
        rank, step = self.trainer.global_rank, self.trainer.global_step
        if self.killed_at == (rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
        with (self.notes / f"samples-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.trainer.current_epoch, step, indices.tolist()]) + "\n")
        return (self.net(values) - indices[:, None] / NUM_SAMPLES).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.05)


def train(
    root: Path, job: str | None, batch_size: int, accumulate: int, killed_at: tuple[int, int] | None, num_fits: int = 1
) -> list[tuple[int, dict[str, Tensor]]]:
    """Return the number of steps and the weights at the end of each fit."""
    if job is not None:
        os.environ["TORCHELASTIC_RUN_ID"] = job
    notes = root / "notes"
    notes.mkdir(exist_ok=True, parents=True)
    ended = []
    for fit in range(num_fits):
        roomier.seed_everything(7 + fit)
        trainer = roomier.Trainer(
            strategy="zero2" if int(os.environ["WORLD_SIZE"]) > 1 else "single",
            accelerator="cpu",
            accumulate_grad_batches=accumulate,
            max_epochs=2,
            logger=False,
            callbacks=[ModelCheckpoint(every_n_train_steps=2)],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=root / "runs",
        )
        model = Model(notes, killed_at if fit == num_fits - 1 else None)
        trainer.fit(model, DataLoader(Numbered(), batch_size=batch_size, shuffle=True))
        named = trainer.engine.weights()
        full = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}
        ended.append((trainer.global_step, {name: each.detach().clone() for name, each in full.items()}))
    return ended


def samples_of(root: Path) -> Steps:
    """Return the samples of each (epoch, step). A repeated step must have the same samples."""
    found: Steps = defaultdict(set)
    for path in (root / "notes").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            epoch, step, indices = json.loads(line)
            found[epoch, step] |= set(indices)
    return found


@pytest.mark.parametrize(
    ("before", "after", "notices"),
    few(
        [
            (
                (2, 4, 1),
                (1, 4, 1),
                "2 ranks x 1 micro-batches x 4 samples and is kept as 1 ranks x 2 micro-batches x 4",
            ),
            ((2, 4, 1), (2, 4, 1), None),
            (
                (1, 4, 2),
                (2, 4, 2),
                "1 ranks x 2 micro-batches x 4 samples and is kept as 2 ranks x 1 micro-batches x 4",
            ),
            ((2, 4, 1), (4, 4, 1), "kept as 4 ranks x 1 micro-batches x 2 samples"),
            ((2, 4, 1), (3, 4, 1), "kept as 3 ranks x 1 micro-batches x 2 to 3 samples"),
        ]
    ),
    ids=["fewer", "same", "more, fewer micro-batches", "more, smaller micro-batches", "unequal shares"],
)
def test_a_restarted_job_keeps_the_global_batch(
    on_ranks: RankPool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    notices: str | None,
) -> None:
    num_ranks, batch_size, accumulate = before
    [(num_steps, undisturbed)] = on_ranks(
        num_ranks, train, tmp_path / "undisturbed", None, batch_size, accumulate, None
    )[0]
    with pytest.raises(RankFailed):
        on_ranks(num_ranks, train, tmp_path / "killed", "job", batch_size, accumulate, (num_ranks - 1, 8))
    printed = capfd.readouterr().out
    assert "resumes from" not in printed
    num_ranks, batch_size, accumulate = after
    [(steps_after, weights)] = on_ranks(num_ranks, train, tmp_path / "killed", "job", batch_size, accumulate, None)[0]
    printed = capfd.readouterr().out
    assert "this job was restarted and resumes from" in printed
    assert (notices or "") in printed
    assert ("the global batch was" in printed) == (notices is not None)
    assert steps_after == num_steps == 12
    assert samples_of(tmp_path / "killed") == samples_of(tmp_path / "undisturbed")
    for name, expected in undisturbed.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-6)


def test_each_sample_is_used_one_time_per_epoch(on_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        on_ranks(2, train, tmp_path, "job", 4, 1, (0, 3))
    on_ranks(1, train, tmp_path, "job", 4, 1, None)
    for epoch in (0, 1):
        steps = [indices for (each, _), indices in samples_of(tmp_path).items() if each == epoch]
        assert sorted(index for indices in steps for index in indices) == list(range(NUM_SAMPLES))


@pytest.mark.more
def test_only_the_same_job_resumes(on_ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    on_ranks(2, train, tmp_path, "job", 4, 1, None)
    on_ranks(2, train, tmp_path, "another job", 4, 1, None)
    on_ranks(2, train, tmp_path, None, 4, 1, None)
    assert "restarted" not in capfd.readouterr().out
    assert len(list((tmp_path / "runs").glob("version_*"))) == 3


@pytest.mark.more
def test_a_script_with_two_fits_resumes_the_interrupted_one(
    on_ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed):
        on_ranks(2, train, tmp_path, "job", 4, 1, (1, 7), num_fits=2)
    capfd.readouterr()
    ended = on_ranks(2, train, tmp_path, "job", 4, 1, None, num_fits=2)[0]
    printed = capfd.readouterr().out
    assert [steps for steps, _ in ended] == [12, 12]
    lines = [line for line in printed.splitlines() if "resumes from" in line]
    assert len(lines) == 2, printed
    assert "version_0" in lines[0]
    assert "version_1" in lines[1]


@pytest.mark.more
def test_more_ranks_than_samples_are_rejected(on_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        on_ranks(2, train, tmp_path, "job", 1, 1, (0, 5))
    with pytest.raises(RankFailed, match=r"devices=3: these ranks cannot share the 2 samples of a step.*: 1, 2"):
        on_ranks(3, train, tmp_path, "job", 1, 1, None)
