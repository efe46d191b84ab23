"""A job that restarts on a number of ranks that the sizes of its strategy do not suit."""

import json
import os
import signal
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import roomier
from roomier.callbacks import Callback, ModelCheckpoint
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import plan_from_flags
from roomier.plan.flags import with_fitting_sizes
from roomier.planner.choosing import choose
from roomier.train.settling import planned
from tests.covering import chosen
from tests.engines.training import NUM_SAMPLES, steps_of
from tests.ranks.pool import RankFailed, RankPool

Strategy = dict[str, Any]


class Numbered(Dataset[Tensor]):
    """Sequences whose first token is their index."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return (index * torch.arange(1, 9)) % NUM_SAMPLES


class Language(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(GPTConfig(NUM_SAMPLES, 8, num_layers=4, num_heads=4, width=16, dropout=0.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch, batch)[1]
        return loss


class Notes(Callback):
    """Note the samples of each micro-batch, sum the losses of a step, and kill the last rank before ``killed_at``."""

    def __init__(self, notes: Path, killed_at: int | None) -> None:
        self.notes, self.killed_at, self.step = notes, killed_at, 0
        self.losses: dict[int, float] = defaultdict(float)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        self.step = trainer.global_step
        if self.step == self.killed_at and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses = [0.0] * len(batch)  # not known yet
        with (self.notes / f"samples-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.current_epoch, self.step, batch[:, 0].tolist(), losses]) + "\n")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if "loss" in outputs:  # in a pipeline, only the last stage computes the loss
            self.losses[self.step] += float(outputs["loss"])


def train(
    notes: Path,
    job: str | None,
    strategy: Strategy | str,
    samples: tuple[int, int],
    killed_at: int | None = None,
    budget_bytes: int | None = None,
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Return the losses of this rank by step, and the weights at the end, on devices of ``budget_bytes``."""
    if budget_bytes is not None:
        choose.budget_of = lambda plan, machine: budget_bytes  # type: ignore[assignment]  # of this process
        planned.SMALL_SHARE = 0
    if job is not None:
        os.environ["TORCHELASTIC_RUN_ID"] = job
    notes.mkdir(exist_ok=True, parents=True)
    roomier.seed_everything(7)
    callback, (batch_size, accumulate) = Notes(notes, killed_at), samples
    trainer = roomier.Trainer(
        strategy=strategy,
        accelerator="cpu",
        accumulate_grad_batches=accumulate,
        max_epochs=2,
        optimizer={"name": "adamw", "lr": 0.01, "eps": 1e-3},
        logger=False,
        callbacks=[callback, ModelCheckpoint(every_n_train_steps=2)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=notes / "runs",
    )
    trainer.fit(Language(), DataLoader(Numbered(), batch_size, shuffle=True))
    named = trainer.engine.weights()
    full = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in named.items()}
    return dict(callback.losses), {name: each.detach().clone() for name, each in full.items()}


def mean_losses(results: Sequence[tuple[dict[int, float], Any]]) -> dict[int, float]:
    """Return the loss of the global batch in each step."""
    computed = [losses for losses, _ in results if losses]
    return {step: sum(losses[step] for losses in computed) / len(computed) for step in computed[0]}


LAYOUTS = {
    "shards": ({"name": "hsdp", "shard_size": 4}, (2, 1)),
    "context": ({"name": "zero3", "context_parallel_size": 4}, (8, 1)),
    "stages": (
        {
            "name": "ddp",
            "pipeline_parallel_size": 4,
            "split": ["network.blocks.1", "network.blocks.2", "network.blocks.3"],
        },
        (2, 4),
    ),
}
"""Strategies for 4 ranks, with the batch size and the accumulation that give the global batch."""

CHANGES = {
    "shards": ({"shard_size": 2}, {"shard_size": 3}),
    "context": ({"context_parallel_size": 2}, {"context_parallel_size": 1}),
    "stages": ({"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}),
}
"""Sizes on 2 and on 3 ranks."""


@pytest.mark.parametrize("layout", chosen(LAYOUTS, {"stages"}))
def test_sizes_follow_the_ranks(
    on_ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str], layout: str
) -> None:
    strategy, samples = LAYOUTS[layout]
    expected = on_ranks(4, train, tmp_path / "undisturbed", None, strategy, samples)
    folder = tmp_path / "killed"
    with pytest.raises(RankFailed):
        on_ranks(4, train, folder, "job", strategy, samples, 3)
    capfd.readouterr()
    with pytest.raises(RankFailed):
        on_ranks(2, train, folder, "job", strategy, samples, 7)
    printed = [capfd.readouterr().out]
    results = on_ranks(3, train, folder, "job", strategy, samples)
    printed.append(capfd.readouterr().out)
    for text, num_ranks, sizes in zip(printed, (2, 3), CHANGES[layout], strict=True):
        [line] = [line for line in text.splitlines() if "this job was restarted on" in line]
        assert f"on {num_ranks} ranks: strategy={strategy} is now {{'name': '{strategy['name']}'" in line
        assert str(sizes)[1:-1] in line.partition("is now")[2]
    assert steps_of(folder) == steps_of(tmp_path / "undisturbed")
    losses, expected_losses = mean_losses(results), mean_losses(expected)
    assert list(losses) == list(range(6, 12))
    assert losses == pytest.approx({step: expected_losses[step] for step in losses}, abs=1e-5)
    torch.testing.assert_close(results[0][1], expected[0][1], rtol=1e-5, atol=1e-6)


BUDGET_BYTES = 190_000  # zero2 fits on 4 ranks only


@pytest.mark.more
def test_if_the_plan_does_not_fit_on_fewer_ranks_the_job_uses_another_one(
    on_ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = on_ranks(4, train, tmp_path / "undisturbed", None, "zero2", (2, 1))
    folder = tmp_path / "killed"
    for num_ranks, killed_at in (4, 3), (2, 7):
        with pytest.raises(RankFailed):
            on_ranks(num_ranks, train, folder, "job", "zero2", (2, 1), killed_at, BUDGET_BYTES)
    results = on_ranks(4, train, folder, "job", "zero2", (2, 1), None, BUDGET_BYTES)
    lines = [line for line in capfd.readouterr().out.splitlines() if "does not fit" in line]
    assert len(lines) == 1, lines
    assert "strategy='zero2' does not fit on 2 ranks, so this restarted job uses" in lines[0]
    assert steps_of(folder) == steps_of(tmp_path / "undisturbed")
    losses, expected_losses = mean_losses(results), mean_losses(expected)
    assert losses == pytest.approx({step: expected_losses[step] for step in losses}, abs=1e-5)
    torch.testing.assert_close(results[0][1], expected[0][1], rtol=1e-5, atol=1e-6)


@pytest.mark.more
def test_if_no_plan_fits_the_error_names_the_smallest_number_of_ranks(on_ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        on_ranks(4, train, tmp_path, "job", "zero2", (2, 1), 3)
    with pytest.raises(RankFailed, match=r"but the budget is .*use devices=3: with 3 ranks, zero3 needs"):
        on_ranks(2, train, tmp_path, "job", "zero2", (2, 1), None, 100_000)


@pytest.mark.more
def test_a_job_that_starts_for_the_first_time_is_rejected(on_ranks: RankPool, tmp_path: Path) -> None:
    strategy, samples = LAYOUTS["context"]
    with pytest.raises(RankFailed, match=r"strategy\.context_parallel_size=4: must divide the number of ranks \(2\)"):
        on_ranks(2, train, tmp_path, "job", strategy, samples)
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("strategy", "ranks", "expected"),
    [
        # as many ranks for a replica, or all
        ({"name": "hsdp", "shard_size": 4}, (6, 1), {"name": "hsdp", "shard_size": 6}),
        ({"name": "hsdp", "shard_size": 4}, (2, 5), {"name": "hsdp", "shard_size": 5}),
        ({"name": "hsdp", "shard_size": 8}, (2, 1), {"name": "hsdp", "shard_size": 2}),
        # a divisor of the size and of the ranks that share a replica
        ({"name": "zero3", "context_parallel_size": 4}, (6, 1), {"name": "zero3", "context_parallel_size": 2}),
        (
            {"name": "hsdp", "shard_size": 4, "context_parallel_size": 2},
            (5, 2),
            {"name": "hsdp", "shard_size": 5, "context_parallel_size": 1},
        ),
        (
            {"name": "hybrid_shard", "context_parallel_size": 2},
            (3, 2),
            {"name": "hybrid_shard", "context_parallel_size": 1},
        ),
        # no more stages than before
        (
            {"name": "ddp", "pipeline_parallel_size": 4, "split": ["a", "b", "c"]},
            (6, 1),
            {"name": "ddp", "pipeline_parallel_size": 3},
        ),
        (
            {"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "name": "ddp"},
            (3, 1),
            {"name": "ddp", "pipeline_parallel_size": 1},
        ),
        ({"name": "ddp", "pipeline_parallel_size": 2, "split": ["a"]}, (4, 1), None),
        ({"name": "hsdp", "shard_size": "4"}, (3, 1), None),
    ],
)
def test_fitting_sizes(strategy: Strategy, ranks: tuple[int, int], expected: Strategy | None) -> None:
    found = with_fitting_sizes({"strategy": strategy, "seeding": None}, *ranks)
    assert found["strategy"] == (expected or strategy)
    has_peers = {"context_parallel_size", "pipeline_parallel_size"} & strategy.keys()
    assert found["seeding"] == ("events" if has_peers else None)
    if expected is not None:
        plan_from_flags(**found, devices=ranks[0], num_nodes=ranks[1])
