"""Every sample is trained once per epoch, even if the epoch resumes on a different number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset
from torchmetrics import SumMetric

import roomier
from roomier.callbacks import ModelCheckpoint
from tests.covering import few

NUM_SAMPLES = 48


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Reads(roomier.Module):
    """Module that records the samples of each epoch, and logs their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.read: dict[int, list[int]] = {}
        self.total = SumMetric()

    def training_step(self, batch, batch_idx):
        self.read.setdefault(self.current_epoch, []).extend(batch.tolist())
        self.total.update(batch)
        self.log("mean", batch.double().mean(), on_step=False, on_epoch=True)
        self.log("largest", batch.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("total", self.total, on_step=False, on_epoch=True)
        return 0.0 * self.net(batch.float().reshape(-1, 1)).mean()

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            self.of_epoch = {name: float(self.trainer.callback_metrics[name]) for name in ("mean", "largest", "total")}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def loader(kind: str, batch_size: int) -> Any:
    if kind == "shuffled":
        return DataLoader(Numbers(), batch_size=batch_size, shuffle=True)
    if kind == "own sampler":
        return DataLoader(Numbers(), batch_size=batch_size, sampler=RandomSampler(Numbers(), num_samples=NUM_SAMPLES))
    if kind == "workers":
        return DataLoader(Numbers(), batch_size=batch_size, shuffle=True, num_workers=1)
    return list(torch.arange(NUM_SAMPLES).split(batch_size))


def train(
    size: int, strategy: str, kind: str, batch_size: int, root: Path, max_steps: int, resumes: bool
) -> tuple[Any, Any]:
    module = Reads()
    trainer = roomier.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=2,
        max_steps=max_steps,
        default_root_dir=root,
        callbacks=[ModelCheckpoint(every_n_train_steps=3)],
        **({"strategy": strategy, "devices": size} if size > 1 else {}),
    )
    trainer.fit(module, loader(kind, batch_size), ckpt_path="last" if resumes else None)
    return module.read, getattr(module, "of_epoch", None)


def read_by(on_ranks: Any, size: int, *args: Any) -> tuple[dict[int, list[int]], Any]:
    """Return the samples of all ranks by epoch, and the values that the first rank logged."""
    of_ranks = on_ranks(size, train, size, *args) if size > 1 else [train(size, *args)]
    assert all(logged == of_ranks[0][1] for _, logged in of_ranks)
    epochs = {epoch for read, _ in of_ranks for epoch in read}
    merged = {epoch: [sample for read, _ in of_ranks for sample in read.get(epoch, [])] for epoch in epochs}
    return merged, of_ranks[0][1]


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    few(
        [
            ("shuffled", (2, "zero3"), (3, "zero1")),
            ("shuffled", (2, "zero2"), (4, "ddp")),
            ("shuffled", (2, "ddp"), (1, "single")),
            ("shuffled", (1, "single"), (2, "zero3")),
            ("list", (4, "zero2"), (3, "ddp")),
            ("workers", (2, "ddp"), (2, "ddp")),
            ("own sampler", (2, "ddp"), (4, "ddp")),
        ],
    ),
)
def test_epoch_resumes_on_other_ranks(on_ranks, tmp_path, kind: str, before: Any, after: Any):
    max_steps = {1: 12, 2: 6, 4: 3}[before[0]]
    first, _ = read_by(on_ranks, *before, kind, 2, tmp_path, max_steps, False)
    assert set(first) == {0}
    assert len(first[0]) == 24
    rest, logged = read_by(on_ranks, *after, kind, 2, tmp_path, -1, True)
    assert sorted(first[0] + rest[0]) == list(range(NUM_SAMPLES))
    assert sorted(rest[1]) == list(range(NUM_SAMPLES))
    # The metrics of the epoch include the samples that the ranks read before the resume.
    assert logged == {"mean": 23.5, "largest": 47.0, "total": float(sum(range(NUM_SAMPLES)))}


def curve(size: int, accumulate: int, shuffle: bool, drop_last: bool) -> list[float]:
    """Return the losses of a small regression with global batches of 8."""
    losses: list[float] = []

    class Regression(roomier.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return (self.net(x).squeeze(-1) - y).square().mean()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if (batch_idx + 1) % accumulate == 0:
                with torch.no_grad():
                    losses.append(float(self.net.weight.detach().square().sum()))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(45, 3, generator=generator), torch.randn(45, generator=generator))
    torch.manual_seed(5)
    trainer = roomier.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        **({"strategy": "ddp", "devices": size} if size > 1 else {}),
    )
    trainer.fit(
        Regression(), DataLoader(data, batch_size=8 // size // accumulate, shuffle=shuffle, drop_last=drop_last)
    )
    return losses


@pytest.mark.parametrize(("shuffle", "drop_last"), few([(True, False), (False, True)]))
def test_same_batches_produce_the_same_steps(on_ranks, shuffle: bool, drop_last: bool):
    """With 45 samples, the last global batch of an epoch has 5 samples, which 2 and 4 ranks cannot divide evenly."""
    alone = curve(1, 1, shuffle, drop_last)
    assert len(alone) == 2 * (5 if drop_last else 6)
    for size in (2, 4):
        for losses in on_ranks(size, curve, size, 1, shuffle, drop_last):
            assert losses == pytest.approx(alone, rel=1e-5)
