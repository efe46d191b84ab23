"""Intended differences of steps, data and messages."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.lightning.both import make_trainer
from tests.lightning.difference import (
    Noise,
    Reads,
    ReadsStream,
    Steps,
    base_module,
    differs,
    fit,
    outcome,
)
from tests.lightning.modules import Regression, in_order, pl

# Gradients and updates ------------------------------------------------------------------------------------------------


@differs(
    "the gradient of the last window of an epoch, with accumulation",
    lightning="is divided by `accumulate_grad_batches`, even if the window has fewer micro-batches",
    roomier="is averaged over the micro-batches of the window that have a loss",
    reason="the size of an update must not depend on the length of the epoch",
    expected=(0.5, 1.0),
)
def change_of_a_short_window(kind: Any, folder: Path) -> float:
    changes = []
    for accumulate in (4, 2):
        torch.manual_seed(0)
        module = Steps()
        before = module.net[0].weight.detach().clone()
        fit(kind, folder, module, in_order(2), accumulate_grad_batches=accumulate)
        changes.append(float((module.net[0].weight - before).norm()))
    return round(changes[0] / changes[1], 4)


@differs(
    "tf32",
    lightning="is used by default in convolutions on NVIDIA GPUs, as in torch",
    roomier='is used only if `matmul_precision` selects it; `precision="32-true"` also means float32 in convolutions',
    reason="the precision is part of the Plan and must not depend on the device",
    expected=(True, False),
)
def convolutions_use_tf32(kind: Any, folder: Path) -> bool:
    found: list[bool] = []
    torch.backends.cudnn.allow_tf32 = True  # torch's default
    fit(kind, folder, Steps(lambda module, batch_idx: found.append(torch.backends.cudnn.allow_tf32)))
    return found[0]


@differs(
    "a non-finite loss",
    lightning="does not end the run",
    roomier="ends the run with a `TrainingError`, unless a `SpikeGuard` handles it",
    reason="NaN weights must not replace the last valid checkpoint",
    expected=("completes", "TrainingError"),
)
def end_with_a_loss_that_is_not_finite(kind: Any, folder: Path) -> str:
    class NotFinite(Steps):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * torch.nan

    return outcome(lambda: fit(kind, folder, NotFinite()))


@differs(
    "a `training_step` that never returns a loss",
    lightning="does not raise an error",
    roomier="raises a `TrainingError` after the first epoch",
    reason="no parameter would be trained",
    expected=("completes", "TrainingError"),
)
def end_without_a_loss(kind: Any, folder: Path) -> str:
    class NoLoss(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    return outcome(lambda: fit(kind, folder, NoLoss()))


@differs(
    "the second `fit` of a Trainer",
    lightning="continues the counters, so it does nothing if `max_epochs` is reached",
    roomier="resets counters and optimizers, and starts from the current weights",
    reason="each call starts a new run; pass `ckpt_path` to continue a run",
    expected=(4, 8),
)
def num_steps_of_two_fits(kind: Any, folder: Path) -> int:
    steps: list[int] = []
    module = Steps(lambda module, batch_idx: steps.append(batch_idx))
    fit(kind, folder, module).fit(module, in_order(4))
    return len(steps)


@differs(
    "`configure_gradient_clipping`",
    lightning='receives None if no algorithm was set, which means `"norm"`',
    roomier='receives `"norm"`',
    reason="the Plan contains the value that is used",
    expected=(None, "norm"),
)
def algorithm_of_clipping(kind: Any, folder: Path) -> Any:
    found: list[Any] = []

    class Clips(Steps):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            found.append(gradient_clip_algorithm)

    fit(kind, folder, Clips(), gradient_clip_val=1.0)
    return found[0]


@differs(
    "`clip_gradients` in `configure_gradient_clipping`",
    lightning="rejects a value that differs from the Trainer's `gradient_clip_val`",
    roomier="clips by the value that it receives",
    reason="the explicit call in the module takes precedence",
    expected=("MisconfigurationException", "completes"),
)
def clipping_by_another_value(kind: Any, folder: Path) -> str:
    class Clips(base_module(kind)):  # type: ignore[misc]
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **keywords: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    return outcome(lambda: fit(kind, folder, Clips(), gradient_clip_val=1.0))


@differs(
    "`configure_optimizers` that returns None",
    lightning="means that the module is trained without an optimizer",
    roomier="raises an error for a `roomier.Module`; a LightningModule is trained without an optimizer, with a notice",
    reason="a forgotten `return` must not go unnoticed",
    expected=("completes", "PlanError"),
)
def end_without_an_optimizer(kind: Any, folder: Path) -> str:
    class Forgets(base_module(kind)):  # type: ignore[misc]
        def configure_optimizers(self) -> None: ...

    return outcome(lambda: fit(kind, folder, Forgets()))


@differs(
    "LBFGS with `accumulate_grad_batches`",
    lightning="evaluates the closure on the last micro-batch of the window",
    roomier="raises an error",
    reason="each evaluation of the loss must use all micro-batches of the window",
    expected=("completes", "RoomierError"),
)
def lbfgs_with_accumulation(kind: Any, folder: Path) -> str:
    class WithLBFGS(Steps):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    return outcome(lambda: fit(kind, folder, WithLBFGS(), accumulate_grad_batches=2))


@differs(
    "`optimizer.step`",
    lightning="receives a closure that runs `training_step`",
    roomier="is called after backward without a closure, unless the optimizer requires one or the module overrides "
    "`optimizer_step`",
    reason="an update can be deferred, sharded or moved to the CPU only if it is separate from backward",
    expected=(True, False),
)
def step_receives_a_closure(kind: Any, folder: Path) -> bool:
    found: list[bool] = []

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found.append(closure is not None)
            return super().step(closure)

    class WithWatched(Steps):
        def configure_optimizers(self) -> Any:
            return Watched(self.parameters(), lr=0.1)

    fit(kind, folder, WithWatched())
    return found[0]


@differs(
    "an unknown key in a scheduler configuration",
    lightning="is ignored with a warning",
    roomier="raises an error that suggests the nearest key",
    reason="a misspelled `interval` would change the learning rate",
    expected=("completes", "RoomierError"),
)
def end_with_a_misspelled_interval(kind: Any, folder: Path) -> str:
    class Misspelled(Steps):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "intervall": "step"}]

    return outcome(lambda: fit(kind, folder, Misspelled()))


@differs(
    "the return value of `training_step` with manual optimization",
    lightning="must be a tensor, a dict or None",
    roomier="can be any value, which is passed to the hooks",
    reason="the module computes its own loss",
    expected=("MisconfigurationException", "completes"),
)
def manual_step_that_returns_a_number(kind: Any, folder: Path) -> str:
    class Manual(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> int:
            return 5

    return outcome(lambda: fit(kind, folder, Manual()))


@differs(
    'a checkpoint after a validation, with a ReduceLROnPlateau of interval "step"',
    lightning="is saved before the scheduler steps",
    roomier="is saved after the scheduler steps",
    reason="a run can resume exactly only after a complete step",
    expected=(3, 4),
)
def steps_of_the_saved_scheduler(kind: Any, folder: Path) -> int:
    class Watching(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "train_loss"}]

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            self.num_steps = checkpoint["lr_schedulers"][0]["last_epoch"]

    module = Watching()
    saves = pl.callbacks.ModelCheckpoint(folder / "saves", save_on_train_epoch_end=False)
    fit(kind, folder, module, in_order(4), in_order(1), enable_checkpointing=True, callbacks=[saves])
    return int(module.num_steps)


@differs(
    "`trainer.accumulate_grad_batches` before a fit, with a `GradientAccumulationScheduler`",
    lightning="is 1",
    roomier="is the value for the first epoch",
    reason="the number of steps in the run is computed from this value",
    expected=(1, 4),
)
def accumulation_before_a_fit(kind: Any, folder: Path) -> int:
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 4})
    return int(make_trainer(kind, folder, callbacks=[scheduler]).accumulate_grad_batches)


# Data and loops -------------------------------------------------------------------------------------------------------


@differs(
    "a list passed as the loader",
    lightning="is a collection of loaders",
    roomier="is one loader if its items are batches, and a collection if its items are loaders",
    reason="a list of batches is the simplest loader",
    expected=(list, torch.Tensor),
)
def batch_of_a_list(kind: Any, folder: Path) -> type:
    kinds: list[type] = []

    class OfList(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kinds.append(type(batch))
            return self.net(batch[0] if isinstance(batch, list) else batch).mean()

    fit(kind, folder, OfList(), [torch.ones(3, 4), torch.ones(3, 4)])
    return kinds[0]


@differs(
    "a loader without a length",
    lightning="is read one batch ahead, to detect the last batch",
    roomier='is not read ahead, so `is_last_batch` is always False, and schedulers with interval "epoch" step at the '
    "end of the epoch, before its validation",
    reason="a resumed run continues exactly at the next sample of the stream",
    expected=(2, 1),
)
def reads_before_the_first_step(kind: Any, folder: Path) -> int:
    data, found = ReadsStream(), list[int]()
    fit(kind, folder, Steps(lambda *given: found.append(data.num_reads)), DataLoader(data, batch_size=1))
    return found[0]


@differs(
    "a training loader without a length that yields no batches",
    lightning="ends the fit with a warning",
    roomier="raises an error",
    reason="no parameter would be trained",
    expected=("completes", "DataError"),
)
def end_with_an_empty_stream(kind: Any, folder: Path) -> str:
    class Empty(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    return outcome(lambda: fit(kind, folder, train=DataLoader(Empty())))


@differs(
    "the micro-batches of a window, with accumulation",
    lightning="are read one by one, each before its own `training_step`",
    roomier="are all read before the first `training_step` of the window, so a dataset that draws random "
    "numbers in the main process draws different numbers than in Lightning",
    reason="the weight of a micro-batch depends on all micro-batches of its window",
    expected=(1, 4),
)
def reads_before_the_first_window(kind: Any, folder: Path) -> int:
    data, found = Reads(), list[int]()
    module = Steps(lambda *given: found.append(data.num_reads))
    fit(kind, folder, module, DataLoader(data, batch_size=1), accumulate_grad_batches=4)
    return found[0]


@differs(
    "random numbers in worker processes",
    lightning="depend on the worker that reads a sample",
    roomier="depend on the seed, the epoch and the sample",
    reason="a resumed run, or a run with a different number of workers or ranks, must read the same samples",
    expected=(False, True),
)
def samples_are_equal_for_any_number_of_workers(kind: Any, folder: Path) -> bool:
    found = []
    for num_workers in (1, 2):
        torch.manual_seed(0)
        batches: list[torch.Tensor] = []

        class Keeps(Steps):
            def training_step(self, batch: Any, batch_idx: int, batches: list[torch.Tensor] = batches) -> Any:
                batches.append(batch[0])
                return self.loss(batch)

        fit(kind, folder, Keeps(), DataLoader(Noise(), batch_size=2, num_workers=num_workers))
        found.append(torch.cat(batches))
    return torch.equal(*found)


@differs(
    "a validation that is due within a window",
    lightning="runs before the update of the window",
    roomier="runs after the update of the window",
    reason="a run can resume exactly only between two windows",
    expected=(0, 1),
)
def step_of_the_first_validation(kind: Any, folder: Path) -> int:
    steps: list[int] = []

    class Validates(Steps):
        def on_validation_start(self) -> None:
            steps.append(self.trainer.global_step)

    fit(kind, folder, Validates(), in_order(4), in_order(1), accumulate_grad_batches=4, val_check_interval=2)
    return steps[0]


@differs(
    "the hooks `train_dataloader` and `val_dataloader`",
    lightning="are called after `on_fit_start`",
    roomier="are called before `on_fit_start`",
    reason="the Plan and the position of a resumed run depend on the loaders",
    expected=(["on_fit_start", "train_dataloader"], ["train_dataloader", "on_fit_start"]),
)
def order_before_a_fit(kind: Any, folder: Path) -> list[str]:
    calls: list[str] = []

    class Ordered(Steps):
        def train_dataloader(self) -> Any:
            calls.append("train_dataloader")
            return in_order(1)

        def on_fit_start(self) -> None:
            calls.append("on_fit_start")

    make_trainer(kind, folder, max_epochs=1).fit(Ordered())
    return calls


@differs(
    "`reload_dataloaders_every_n_epochs` if some epochs have no validation",
    lightning="calls `val_dataloader` before the next validation",
    roomier="calls `train_dataloader` and `val_dataloader` at the start of the same epoch",
    reason="training and validation data are reloaded together",
    expected=([2, 8], [0, 4, 8]),
)
def epochs_of_reloaded_validation_data(kind: Any, folder: Path) -> list[int]:
    epochs: list[int] = []

    class Reloads(Steps):
        def train_dataloader(self) -> Any:
            return in_order(1)

        def val_dataloader(self) -> Any:
            epochs.append(self.current_epoch)
            return in_order(1)

    keywords = {"check_val_every_n_epoch": 3, "reload_dataloaders_every_n_epochs": 4, "max_epochs": 10}
    make_trainer(kind, folder, num_sanity_val_steps=0, **keywords).fit(Reloads())
    return epochs


@differs(
    'a `CombinedLoader` in mode `"sequential"`',
    lightning="raises an error in `fit`",
    roomier="trains on one loader after the other",
    reason="any iterable of batches can be a training loader",
    expected=("ValueError", "completes"),
)
def end_with_sequential_loaders(kind: Any, folder: Path) -> str:
    loaders = pl.utilities.CombinedLoader([in_order(1), in_order(1)], "sequential")
    return outcome(lambda: fit(kind, folder, train=loaders))


@differs(
    "`teardown`",
    lightning="does not run after an error",
    roomier="also runs after an error",
    reason="files and processes must also be released after an error",
    expected=([], ["teardown"]),
)
def teardown_after_an_error(kind: Any, folder: Path) -> list[str]:
    calls: list[str] = []

    class Fails(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError

        def teardown(self, stage: str) -> None:
            calls.append("teardown")

    assert outcome(lambda: fit(kind, folder, Fails())) == "ValueError"
    return calls


@differs(
    "a callback whose `on_train_batch_start` returns -1",
    lightning="has no effect; only the module can return -1 to skip the rest of the epoch",
    roomier="skips the rest of the epoch",
    reason="callbacks can end an epoch early",
    expected=(4, 0),
)
def num_steps_with_a_callback_that_skips(kind: Any, folder: Path) -> int:
    class Skips(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> int:
            return -1

    return fit(kind, folder, callbacks=[Skips()]).global_step


@differs(
    "`current_epoch` after a fit that ends within an epoch",
    lightning="is the index of the next epoch",
    roomier="is the index of the incomplete epoch",
    reason="a resumed run completes this epoch",
    expected=(1, 0),
)
def epoch_after_a_part_of_an_epoch(kind: Any, folder: Path) -> int:
    return fit(kind, folder, max_epochs=3, max_steps=2).current_epoch


# Messages -------------------------------------------------------------------------------------------------------------


@differs(
    "errors for invalid arguments",
    lightning="are `MisconfigurationException`, `ValueError` or `TypeError`",
    roomier="are a `RoomierError` (a `ValueError`), which names the argument, its value and a correction",
    reason="a script needs to catch only one class",
    expected=("MisconfigurationException", "RoomierError"),
)
def error_of_an_argument(kind: Any, folder: Path) -> str:
    return outcome(lambda: make_trainer(kind, folder, limit_train_batches=-0.1))


@differs(
    "warnings",
    lightning="are Python warnings, some of which concern harmless settings (few workers, no `val_dataloader`)",
    roomier="are notices on standard error",
    reason="a notice names the cause and an action, and is not hidden by warning filters",
    expected=(True, False),
)
def missing_data_is_a_python_warning(kind: Any, folder: Path) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(kind, folder, Regression())
    return any("validation_step" in str(each.message) for each in caught)


@differs(
    "the environment variables `PL_TRAINER_*`",
    lightning="set arguments of the Trainer",
    roomier="have no effect",
    reason="the script and the Plan must describe the run completely",
    expected=(3, -1),
)
def max_steps_of_the_environment(kind: Any, folder: Path) -> int:
    os.environ["PL_TRAINER_MAX_STEPS"] = "3"
    try:
        return int(make_trainer(kind, folder).max_steps)
    finally:
        del os.environ["PL_TRAINER_MAX_STEPS"]
