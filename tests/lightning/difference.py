"""One row of the table of differences between roomier's Trainer and Lightning's, and the runs that observe it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from roomier import Module
from tests.lightning.both import make_trainer
from tests.lightning.modules import Regression, in_order, pl, samples

Observe = Callable[[Any, Path], Any]


@dataclass(frozen=True)
class Difference:
    """One row of the table.

    Attributes:
        topic: what differs.
        lightning, roomier: the behavior of each Trainer.
        reason: why roomier differs.
        observe: function that receives a class of Trainers and an empty folder, and returns an observation.
        expected: the observations for Lightning's Trainer and roomier's, which show that the texts are true.
    """

    topic: str
    lightning: str
    roomier: str
    reason: str
    observe: Observe
    expected: tuple[Any, Any]


DIFFERENCES: list[Difference] = []


def differs(
    topic: str, *, lightning: str, roomier: str, reason: str, expected: tuple[Any, Any]
) -> Callable[[Observe], Observe]:
    """Add a row that the decorated function observes."""

    def add(observe: Observe) -> Observe:
        DIFFERENCES.append(Difference(topic, lightning, roomier, reason, observe, expected))
        return observe

    return add


def fit(kind: Any, folder: Path, module: Any = None, train: Any = None, val: Any = None, **keywords: Any) -> Any:
    """Fit ``module`` and return the Trainer."""
    path, given = keywords.pop("ckpt_path", None), {"max_epochs": 1, "num_sanity_val_steps": 0, **keywords}
    trainer = make_trainer(kind, folder, **given)
    trainer.fit(Steps() if module is None else module, in_order(4) if train is None else train, val, ckpt_path=path)
    return trainer


def outcome(function: Callable[[], Any]) -> str:
    """Return the name of the error that ``function`` raises, or ``"completes"``."""
    try:
        function()
    except BaseException as error:
        return type(error).__name__
    return "completes"


class Steps(Regression):
    """Module that calls ``watch`` in each training step, and uses SGD."""

    def __init__(self, watch: Callable[[Any, int], Any] = lambda module, batch_idx: None) -> None:
        super().__init__()
        self.watch = watch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.watch(self, batch_idx)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnSteps(Module):
    """A module of roomier that uses SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def base_module(kind: Any) -> Any:
    """Return the class of modules that belongs to the Trainer."""
    return Steps if kind is pl.Trainer else OwnSteps


class Reads(Dataset[Any]):
    """Dataset that counts its reads."""

    def __init__(self) -> None:
        self.data, self.num_reads = samples(), 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return self.data[index]


class Noise(Dataset[Any]):
    """Dataset of random numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.rand(4), torch.rand(1)


class ReadsStream(IterableDataset[Any]):
    """Stream that counts its reads."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __iter__(self) -> Iterator[Any]:
        for sample in itertools.islice(samples(), 4):
            self.num_reads += 1
            yield sample


class Recorded(pl.loggers.logger.Logger):
    """Logger that stores its rows."""

    name, version = "recorded", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def rows_of(kind: Any, folder: Path, **keywords: Any) -> list[tuple[int, dict[str, float]]]:
    """Return the rows of a fit with four steps that log ``train_loss``."""
    logger = Recorded()
    fit(kind, folder, Regression(), logger=logger, **keywords)
    return logger.rows
