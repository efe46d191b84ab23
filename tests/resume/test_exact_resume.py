"""For many configurations, a run that was stopped and resumed is bit-identical to an uninterrupted run."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from roomier import Module
from tests.covering import chosen

Make = Callable[..., Any]


# Modules and schedulers ----------------------------------------------------------------------------------------------


def scheduled(make_scheduler: Make, **config: Any) -> Make:
    """Return a ``configure_optimizers`` that uses the scheduler from ``make_scheduler(optimizer)``."""

    def configure(module: nn.Module) -> dict[str, Any]:
        optimizer = AdamW(module.parameters(), lr=0.02)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make_scheduler(optimizer), **config}}

    return configure


def warm_then_cosine(optimizer: Optimizer) -> SequentialLR:
    warm, cosine = LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 20)
    return SequentialLR(optimizer, [warm, cosine], milestones=[4])


def explode_at_times(batch_idx: int) -> float:
    # multiplied by the scale of 2^16, the gradients are infinite, so the step is skipped
    return 1e36 if batch_idx % 4 == 2 else 1.0


class Measured(Module):
    """Module that logs torchmetrics objects per epoch: a mean, a collection with shared updates, and a list of
    values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.mean = torchmetrics.MeanMetric()
        self.hits = torchmetrics.MetricCollection(
            [torchmetrics.classification.BinaryAccuracy(), torchmetrics.classification.BinaryPrecision()]
        )
        self.all_values = torchmetrics.CatMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.layer(batch).squeeze(1)
        loss = logits.square().mean()
        self.mean(loss.detach())
        self.hits.update(logits, (batch.sum(dim=1) > 3).int())
        self.all_values.update(logits.detach())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log_dict(self.hits, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("median", self.all_values.compute().median())
        self.all_values.reset()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.01)


class Adversaries(Module):
    """Module with manual optimization of two optimizers, one of which steps for every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2))
        self.judge = nn.Linear(3, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        make, judge = self.optimizers()
        fooled = -self.judge(self.maker(batch)).mean()
        make.zero_grad()
        self.manual_backward(fooled)
        make.step()
        if batch_idx % 2 == 0:
            gap = (self.judge(self.maker(batch).detach()) - self.judge(batch)).mean()
            judge.zero_grad()
            self.manual_backward(gap)
            judge.step()
            self.log("gap", gap)
        self.log("fooled", fooled, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> list[Optimizer]:
        return [AdamW(self.maker.parameters(), lr=0.01), SGD(self.judge.parameters(), lr=0.01, momentum=0.9)]


# Data ---------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    """Stream of 22 samples from the three global generators, without a length and without a position."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(22):
            yield torch.rand(3) + float(np.random.rand()) + random.random()


class Counting:
    """Loader that saves its own position."""

    def __init__(self) -> None:
        self.next_batch = 0

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[Tensor]:
        while self.next_batch < len(self):
            self.next_batch += 1
            yield torch.full((2, 3), self.next_batch / 11) + torch.rand(2, 3)
        self.next_batch = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next_batch": self.next_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_batch = state["next_batch"]


def weighted(noisy: Make, **options: Any) -> DataLoader[Tensor]:
    data = noisy()
    sampler = WeightedRandomSampler(torch.linspace(1, 2, len(data)).tolist(), num_samples=len(data))
    return DataLoader(data, batch_size=2, sampler=sampler, **options)


def with_batch_sampler(noisy: Make) -> DataLoader[Tensor]:
    class InReverse(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return iter(list(super().__iter__())[::-1])

    data = noisy()
    return DataLoader(data, batch_sampler=InReverse(RandomSampler(data), 2, drop_last=False))


# The table ----------------------------------------------------------------------------------------------------------


@dataclass
class Situation:
    """Row of the table. By default, an epoch has 11 batches, and a step has one batch.

    Attributes:
        stops: optimizer steps after which the run is stopped and resumed.
        module: function of the class Net that returns a module.
        loader: function of the class Noisy that returns a loader.
        validates: True if the run has validation data.
    """

    stops: tuple[int, ...] = (5,)
    num_steps: int = 18
    module: Make = field(default=lambda net: net())
    loader: Make = field(default=lambda noisy: DataLoader(noisy(), batch_size=2, shuffle=True))
    validates: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def two_workers(noisy: Make) -> DataLoader[Tensor]:
    return DataLoader(noisy(), batch_size=2, shuffle=True, num_workers=2)


SITUATIONS = {
    "within an epoch": Situation(),
    "after the first step": Situation(stops=(1,)),
    "at the end of an epoch": Situation(stops=(11,)),
    "before the last step of an epoch": Situation(stops=(10,)),
    "again and again": Situation(stops=(2, 3, 11, 12, 17)),
    "at a validation within an epoch": Situation(stops=(3, 6), validates=True, options={"val_check_interval": 3}),
    "at the validation of an epoch's end": Situation(stops=(11,), validates=True),
    "validation counted across epochs": Situation(
        stops=(5, 10, 15), validates=True, options={"val_check_interval": 5, "check_val_every_n_epoch": None}
    ),
    "accumulation: 3 steps an epoch, the last of 3 batches": Situation(
        stops=(1, 2, 3, 5), num_steps=7, options={"accumulate_grad_batches": 4}
    ),
    "accumulation, clipped": Situation(
        stops=(2,), num_steps=5, options={"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}
    ),
    "a limited epoch": Situation(stops=(3, 7, 9), options={"limit_train_batches": 7}),
    "cosine, a step at a time": Situation(
        stops=(5, 11), module=lambda net: net(scheduled(lambda o: CosineAnnealingLR(o, 15), interval="step"))
    ),
    "one cycle with momentum": Situation(
        module=lambda net: net(scheduled(lambda o: OneCycleLR(o, 0.1, total_steps=20), interval="step"))
    ),
    "warm-up, then cosine": Situation(
        stops=(3, 5), module=lambda net: net(scheduled(warm_then_cosine, interval="step"))
    ),
    "a lambda, epoch by epoch": Situation(
        stops=(5, 11, 12), module=lambda net: net(scheduled(lambda o: LambdaLR(o, lambda epoch: 0.5**epoch)))
    ),
    "plateau of the validation loss": Situation(
        stops=(5, 11, 24),
        num_steps=40,
        validates=True,
        module=lambda net: net(scheduled(lambda o: ReduceLROnPlateau(o, patience=0), monitor="val_loss")),
    ),
    "16-mixed with skipped steps": Situation(
        stops=(2, 3, 4, 11),
        module=lambda net: net(loss_scale=explode_at_times),
        options={"precision": "16-mixed", "gradient_clip_val": 1.0},
    ),
    "bf16-mixed": Situation(stops=(5, 11), options={"precision": "bf16-mixed"}),
    "bf16-true": Situation(stops=(5, 11), options={"precision": "bf16-true"}),
    "torchmetrics over an epoch": Situation(stops=(1, 5, 11), module=lambda net: Measured()),
    "manual optimization of two optimizers": Situation(stops=(6, 8), num_steps=30, module=lambda net: Adversaries()),
    "a list": Situation(loader=lambda noisy: list(noisy().samples.split(2)), stops=(5, 11)),
    "an iterable that is replayed": Situation(
        loader=lambda noisy: DataLoader(Stream(), batch_size=2), stops=(5, 11, 12)
    ),
    "an iterable with validation at its end": Situation(
        loader=lambda noisy: DataLoader(Stream(), batch_size=2), stops=(5, 11, 12), validates=True
    ),
    "a loader that saves its position": Situation(loader=lambda noisy: Counting(), stops=(5, 11)),
    "a custom sampler": Situation(loader=weighted, stops=(5, 11)),
    "a custom batch sampler": Situation(loader=with_batch_sampler, stops=(5, 11)),
    "an iterable in workers": Situation(
        loader=lambda noisy: DataLoader(Stream(), batch_size=2, num_workers=2), stops=(5, 22), num_steps=30
    ),
    "workers": Situation(loader=two_workers, stops=(5,)),
    "workers and a custom sampler": Situation(loader=lambda noisy: weighted(noisy, num_workers=2), stops=(5,)),
}


IN_MAKE_TEST = {
    "again and again",
    "validation counted across epochs",
    "accumulation: 3 steps an epoch, the last of 3 batches",
    "plateau of the validation loss",
    "16-mixed with skipped steps",
    "manual optimization of two optimizers",
    "torchmetrics over an epoch",
    "an iterable that is replayed",
    "a loader that saves its position",
    "a custom batch sampler",
    "workers",
}


@pytest.mark.parametrize("name", chosen(SITUATIONS, IN_MAKE_TEST))
def test_stopped_and_resumed_run_is_equal_to_an_uninterrupted_run(
    name: str, runs: Any, net: Any, noisy: Any, val_batches: Make
) -> None:
    case = SITUATIONS[name]
    parts = {
        "make_module": lambda: case.module(net),
        "make_loader": lambda: case.loader(noisy),
        "make_val": val_batches if case.validates else None,
    }
    runs.fit("straight", **parts, max_steps=case.num_steps, **case.options)
    told_at_stops = []
    for stop in case.stops:
        trainer = runs.fit("resumed", **parts, max_steps=stop, ckpt_path="last", **case.options)
        assert trainer.global_step == stop
        if trainer.run.progress.batch_idx:  # a fit that ends within an epoch logs the values so far
            told_at_stops.append(runs.rows("resumed")[-1])
    runs.fit("resumed", **parts, max_steps=case.num_steps, ckpt_path="last", **case.options)

    assert runs.differences("straight", "resumed", with_ledger=False) == []
    rows = runs.rows("resumed")
    for row in told_at_stops:
        rows.remove(row)
    assert rows == runs.rows("straight")
