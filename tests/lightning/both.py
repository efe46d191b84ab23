"""Runs of the same module with Lightning's Trainer and with roomier's Trainer, and records of both runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier import Trainer
from tests.lightning.modules import pl


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Ignore warnings that Lightning's dependencies cause, and disable its messages."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def make_trainer(kind: Any, folder: Path, **keywords: Any) -> Any:
    """Return a Trainer of class ``kind`` without files and output."""
    quiet = {f"enable_{what}": False for what in ("checkpointing", "progress_bar", "model_summary")}
    return kind(**{"accelerator": "cpu", "logger": False, "default_root_dir": folder, **quiet, **keywords})


@dataclass
class Seen:
    """Records of a run.

    Attributes:
        losses: loss of each batch.
        metrics: ``callback_metrics`` at the end of each epoch, and at the end of the run.
        weights: weights at the end.
        global_steps: ``global_step`` after each batch.
    """

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    global_steps: list[int] = field(default_factory=list)


def watcher(seen: Seen, base: type) -> Any:
    class Watches(base):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if outputs:
                seen.losses.append(float(outputs["loss"]))
            else:
                seen.losses.append(float(trainer.callback_metrics.get("d_loss", 0.0)))
            seen.global_steps.append(trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.metrics.append(numbers(trainer.callback_metrics))

    return Watches()


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def run_under(
    kind: Any,
    make_module: Callable[[], Any],
    make_loaders: Callable[[], tuple[Any, Any]],
    folder: Path,
    base: type = pl.Callback,
    **keywords: Any,
) -> Seen:
    """Fit a new module from seed 1 with a Trainer of class ``kind``."""
    seen = Seen()
    torch.manual_seed(1)
    module, (train, val) = make_module(), make_loaders()
    trainer = make_trainer(kind, folder, callbacks=[watcher(seen, base)], **{"max_epochs": 3, **keywords})
    if kind is Trainer:
        trainer.fit(module, train, val)
    else:
        with quiet_lightning():
            trainer.fit(module, train, val)
    seen.metrics.append(numbers(trainer.callback_metrics))
    seen.weights = [each.detach().clone() for each in module.parameters()]
    return seen
