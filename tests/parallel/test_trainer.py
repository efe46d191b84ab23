"""Tests that ``Trainer.fit`` on several ranks gives the losses and weights of a plain loop in one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from roomier import Logger, Trainer
from tests.covering import few
from tests.parallel.parity import Setup, Trained, distance, train_bare, whole_weights
from tests.parallel.tasks import Language
from tests.ranks.pool import RankPool

STEP_SAMPLES = 8  # number of samples in the global batch


class Samples(Dataset[dict[str, Tensor]]):
    """The samples of ``batches_of``, as a dataset."""

    def __init__(self, setup: Setup) -> None:
        task, generator = Language(), torch.Generator().manual_seed(1)
        self.batches = [task.make_batch(STEP_SAMPLES, generator) for _ in range(setup.num_steps)]

    def __len__(self) -> int:
        return STEP_SAMPLES * len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index % STEP_SAMPLES] for name, value in self.batches[index // STEP_SAMPLES].items()}


class Fitted(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)


class Rows(Logger):
    """Logger that keeps the loss of each step."""

    name = "rows"

    def __init__(self) -> None:
        self.losses: list[float] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.losses += [metrics["loss"]] if "loss" in metrics else []


def fit(setup: Setup) -> Trained:
    module, rows = Fitted(), Rows()
    strategy = {"name": setup.strategy, **({"shard_size": setup.shard_size} if setup.shard_size else {})}
    trainer = Trainer(
        strategy=strategy if setup.num_ranks > 1 else "single",
        devices=setup.num_ranks,
        accelerator="cpu",
        precision=setup.precision,
        accumulate_grad_batches=setup.accumulate,
        gradient_clip_val=setup.clip,
        optimizer={"name": "adamw", "lr": 3e-3, "eps": 1e-3},
        max_epochs=1,
        logger=rows,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    micro_batch = STEP_SAMPLES // setup.num_ranks // setup.accumulate
    trainer.fit(module, DataLoader(Samples(setup), batch_size=micro_batch))
    assert trainer.global_step == setup.num_steps
    return Trained(rows.losses, [], whole_weights(module))


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "shard_size", "accumulate"),
    few(
        [
            ("zero3", 2, None, 4),
            ("ddp", 2, None, 2),
            ("single", 1, None, 2),
            ("zero1", 2, None, 2),
            ("zero2", 2, None, 1),
            ("hsdp", 4, 2, 2),
        ],
        2,
    ),
)
def test_fit_matches_a_plain_loop(
    on_ranks: RankPool, strategy: str, num_ranks: int, shard_size: int | None, accumulate: int
) -> None:
    micro_batch = STEP_SAMPLES // num_ranks // accumulate
    setup = Setup(strategy, num_ranks, shard_size, accumulate, micro_batch, clip=0.5, num_steps=6)
    results = on_ranks(num_ranks, fit, setup)
    bare = train_bare(Language, setup)
    bare.norms = []  # fit logs no norms
    apart = distance(results[0], bare)
    assert max(apart.losses, apart.weights) < 1e-5, apart
    for other in results[1:]:
        assert other.losses == []  # rank 0 logs
        assert other.weights.keys() == results[0].weights.keys()
        assert all(torch.equal(other.weights[name], weight) for name, weight in results[0].weights.items())
