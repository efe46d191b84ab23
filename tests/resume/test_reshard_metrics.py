"""Resume within an epoch with a different number of ranks: states of torchmetrics objects, and random states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader

from roomier import Callback, Trainer, checkpoint
from roomier.core.device.rng import rng_state, seed_everything
from roomier.train.saving.restore import random_state_of
from tests.ranks.pool import RankPool
from tests.resume.conftest import differing
from tests.resume.reshard import GLOBAL_BATCH, NUM_SAMPLES, Classifier, Samples

pytestmark = pytest.mark.more


class Measured(Classifier):
    """Module with metrics over the sample ids: a mean, a maximum and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.most, self.seen = (
            torchmetrics.MeanMetric(),
            torchmetrics.MaxMetric(),
            torchmetrics.CatMetric(),
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["id"].float()
        for metric in (self.mean, self.most, self.seen):
            metric.update(ids)
        self.log("mean_id", self.mean, on_step=False, on_epoch=True)
        self.log("most_id", self.most, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Seen(Callback):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        metrics = trainer.callback_metrics
        seen = sorted(torch.as_tensor(pl_module.seen.compute()).reshape(-1).tolist())
        self.values.append((float(metrics["mean_id"]), float(metrics["most_id"]), seen))
        pl_module.seen.reset()


def train(folder: Path, num_ranks: int, max_steps: int, path: Path | None = None) -> list[Any]:
    seed_everything(0)
    seen = Seen()
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=num_ranks,
        strategy="zero2" if num_ranks > 1 else "single",
        max_steps=max_steps,
        callbacks=[seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(Samples(), batch_size=GLOBAL_BATCH // num_ranks, shuffle=True, drop_last=True)
    trainer.fit(Measured(), loader, ckpt_path=path)
    trainer.save_checkpoint(folder / "c")
    return seen.values


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 1), (1, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_metrics_of_an_epoch_include_the_steps_before_a_resume(
    before: int, after: int, on_ranks: RankPool, tmp_path: Path
) -> None:
    steps_of_epoch = NUM_SAMPLES // GLOBAL_BATCH
    [(mean, most, seen)] = on_ranks(1, train, tmp_path / "whole", 1, steps_of_epoch)[0]
    on_ranks(before, train, tmp_path / "first", before, 3)
    for values in on_ranks(after, train, tmp_path / "second", after, steps_of_epoch, tmp_path / "first" / "c"):
        [(our_mean, our_most, our_seen)] = values
        assert our_mean == pytest.approx(mean)
        assert our_most == most
        assert our_seen == seen


def test_additional_ranks_get_a_different_and_reproducible_random_state(tmp_path: Path) -> None:
    seed_everything(3)
    stored = {"0": rng_state(), "1": rng_state()}
    checkpoint.save(tmp_path / "c", {"random": stored})
    loaded = checkpoint.load(tmp_path / "c")["random"]
    assert list(differing(random_state_of(1, loaded), stored["1"])) == []
    before = rng_state()
    second, third = (random_state_of(rank, loaded) for rank in (2, 3))
    assert list(differing(rng_state(), before)) == [], "computing the state draws no random numbers"
    assert list(differing(random_state_of(2, loaded), second)) == []
    for state in (second, third):
        assert list(differing(state, stored["0"]))
    assert list(differing(second, third))
