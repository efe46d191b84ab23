"""Intended differences of logs, checkpoints and the Trainer."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from roomier import Trainer
from roomier.callbacks import ModelCheckpoint
from roomier.tuner import LearningRateCurve, Tuner
from tests.lightning.both import make_trainer
from tests.lightning.difference import (
    Steps,
    base_module,
    differs,
    fit,
    outcome,
    rows_of,
)
from tests.lightning.modules import Regression, in_order, pl, samples

# Logging --------------------------------------------------------------------------------------------------------------


@differs(
    "`logger=True`",
    lightning="is a TensorBoardLogger if TensorBoard is installed, otherwise a CSVLogger",
    roomier="writes `metrics.jsonl` and `metrics.csv`",
    reason="each run has the same files, which need no additional package",
    expected=(1, 2),
)
def num_default_loggers(kind: Any, folder: Path) -> int:
    return len(make_trainer(kind, folder, logger=True).loggers)


@differs(
    "`log(..., on_step=False, on_epoch=False)`",
    lightning="raises an error",
    roomier="logs nothing, and prints a notice",
    reason="a mistake in a logging call must not end a run",
    expected=("MisconfigurationException", "completes"),
)
def log_of_no_value(kind: Any, folder: Path) -> str:
    def log(module: Any, batch_idx: int) -> None:
        module.log("x", 1.0, on_step=False, on_epoch=False)

    return outcome(lambda: fit(kind, folder, Steps(log)))


@differs(
    "`step` in rows of the log",
    lightning="is the index of the step, from 0",
    roomier="is the number of completed steps, from 1",
    reason="a row and the checkpoint of the same step have the same number",
    expected=([0, 1, 2, 3], [1, 2, 3, 4]),
)
def steps_of_rows(kind: Any, folder: Path) -> list[int]:
    return [step for step, row in rows_of(kind, folder, log_every_n_steps=1) if "train_loss_step" in row]


@differs(
    "the `loss` column",
    lightning="does not exist",
    roomier="is the loss of the optimizer step, over all its micro-batches and ranks",
    reason="runs can be compared even if their modules log different values",
    expected=(False, True),
)
def rows_contain_the_loss(kind: Any, folder: Path) -> bool:
    return any("loss" in row for _, row in rows_of(kind, folder, log_every_n_steps=1))


@differs(
    "the last step",
    lightning="is logged if it is a multiple of `log_every_n_steps`",
    roomier="is always logged",
    reason="the log ends with the result of the run",
    expected=(1, 2),
)
def num_rows_with_the_loss(kind: Any, folder: Path) -> int:
    return sum("train_loss_step" in row for _, row in rows_of(kind, folder, log_every_n_steps=3))


# Checkpoints and files ------------------------------------------------------------------------------------------------


@differs(
    "checkpoints",
    lightning="are pickle files",
    roomier='are folders without pickle files. `ModelCheckpoint(format="lightning")` and '
    "`roomier export FOLDER --to lightning out.ckpt` write Lightning files",
    reason="loading executes no code, and each rank reads only its shard",
    expected=(("epoch=0-step=4.ckpt", True), ("epoch=0-step=4", False)),
)
def form_of_a_checkpoint(kind: Any, folder: Path) -> tuple[str, bool]:
    path = Path(fit(kind, folder, enable_checkpointing=True).checkpoint_callback.best_model_path)
    return path.name, path.is_file()


@differs(
    "`trainer.save_checkpoint` in a hook",
    lightning="writes the checkpoint immediately",
    roomier="writes the checkpoint at the end of the step, at the save point (hook `on_save_point`)",
    reason="a run can resume exactly only from a save point",
    expected=(True, False),
)
def checkpoint_exists_after_a_save_in_a_step(kind: Any, folder: Path) -> bool:
    found: list[bool] = []

    def save(module: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            module.trainer.save_checkpoint(folder / "saved")
            found.append((folder / "saved").exists())

    fit(kind, folder, Steps(save))
    assert (folder / "saved").exists()
    return found[0]


@differs(
    "objects that are not plain data, added in `on_save_checkpoint`",
    lightning="are pickled",
    roomier="are not saved, because a checkpoint contains only data; a notice names them",
    reason="loading executes no code",
    expected=(timedelta(1), None),
)
def object_in_a_checkpoint(kind: Any, folder: Path) -> Any:
    class Adds(Steps):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["added"] = timedelta(1)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.read = checkpoint.get("added")

    trainer, module = fit(kind, folder, Adds()), Adds()
    trainer.save_checkpoint(folder / "saved")
    make_trainer(kind, folder, max_epochs=2).fit(
        module, in_order(4), ckpt_path=folder / "saved", **({} if kind is not pl.Trainer else {"weights_only": False})
    )
    return module.read


@differs(
    "`on_load_checkpoint` that creates layers during a fit",
    lightning="is called before the optimizers exist, so the layers are trained",
    roomier="raises a `CheckpointError`; create the layers in `configure_model`",
    reason="weights are read directly into the shards, so the sharded model and the optimizers must already exist",
    expected=("completes", "CheckpointError"),
)
def layers_created_while_loading(kind: Any, folder: Path) -> str:
    class Grown(Steps):
        def __init__(self, *, grows: bool = True) -> None:
            super().__init__()
            if grows:
                self.grow()

        def grow(self) -> None:
            self.more = torch.nn.Linear(1, 1)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if not hasattr(self, "more"):
                self.grow()

    fit(kind, folder, Grown()).save_checkpoint(folder / "saved.ckpt")
    return outcome(lambda: fit(kind, folder, Grown(grows=False), max_epochs=2, ckpt_path=folder / "saved.ckpt"))


@differs(
    "the first Ctrl-C or SIGTERM during a fit",
    lightning="ends the run without a checkpoint",
    roomier="completes the step, saves `checkpoints/interrupted-step=N` and exits with code 130 or 143",
    reason="the run can resume exactly, and a job scheduler can determine the reason from the exit code",
    expected=(False, True),
)
def interrupted_run_saves_a_checkpoint(kind: Any, folder: Path) -> bool:
    def interrupt(module: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # other libraries in this process may replace it
    try:
        end = outcome(lambda: fit(kind, folder, Steps(interrupt), enable_checkpointing=True, logger=True))
    finally:
        signal.signal(signal.SIGINT, before)
    assert end in ("SystemExit", "KeyboardInterrupt"), end
    return any(path.name == "interrupted-step=2" for path in folder.rglob("*"))


@differs(
    "`default_root_dir`",
    lightning="is the current folder by default; without a logger, files are written to this folder itself",
    roomier="is `runs` by default; each run has a folder `version_N` in it, even without a logger",
    reason="the files of two runs are never mixed",
    expected=(".", "version_0"),
)
def run_folder_without_a_logger(kind: Any, folder: Path) -> str:
    trainer = fit(kind, folder, enable_checkpointing=True, logger=False)
    return str(Path(trainer.log_dir).relative_to(folder))


@differs(
    "scores of `ModelCheckpoint`",
    lightning="have the dtype of the logged value",
    roomier="are float64",
    reason="metrics are reduced in float64, and different scores can be equal in float32",
    expected=(torch.float32, torch.float64),
)
def dtype_of_a_score(kind: Any, folder: Path) -> torch.dtype:
    trainer = fit(kind, folder, Regression(), val=in_order(2), enable_checkpointing=True, callbacks=[checkpoint(kind)])
    return trainer.checkpoint_callback.best_model_score.dtype


def checkpoint(kind: Any, **keywords: Any) -> Any:
    """Return a ModelCheckpoint that monitors ``val_loss``."""
    return (pl.callbacks.ModelCheckpoint if kind is pl.Trainer else ModelCheckpoint)(monitor="val_loss", **keywords)


def saved_names(kind: Any, folder: Path, module: Any = None, **keywords: Any) -> list[str]:
    """Fit with a ModelCheckpoint and return the names of the saved checkpoints."""
    saves = (pl.callbacks.ModelCheckpoint if kind is pl.Trainer else ModelCheckpoint)(folder / "saves", **keywords)
    outcome(lambda: fit(kind, folder, module, val=in_order(2), enable_checkpointing=True, callbacks=[saves]))
    return sorted(each.name for each in (folder / "saves").glob("*"))


@differs(
    "a fit that ends before the first save of `ModelCheckpoint`",
    lightning="saves nothing",
    roomier="saves the last step, unless `every_n_epochs=0` disables saves",
    reason="the result of a run must not be lost",
    expected=([], ["epoch=0-step=4"]),
)
def checkpoints_of_a_short_fit(kind: Any, folder: Path) -> list[str]:
    return saved_names(kind, folder, every_n_train_steps=100)


@differs(
    "`save_last=True`",
    lightning="copies the newest checkpoint to `last.ckpt`",
    roomier='creates the link `last` to it, as with `save_last="link"`',
    reason="a copy of a large checkpoint costs time and disk space",
    expected=(False, True),
)
def last_is_a_link(kind: Any, folder: Path) -> bool:
    return (folder / "saves" / saved_names(kind, folder, save_last=True)[-1]).is_symlink()


@differs(
    "a metric in `filename` that was not logged",
    lightning="is written as 0",
    roomier="is written as `none`, and a notice names the metric",
    reason="0 could be mistaken for a value of the metric",
    expected=(["unknown=0.ckpt"], ["unknown=none"]),
)
def name_with_an_unavailable_metric(kind: Any, folder: Path) -> list[str]:
    return saved_names(kind, folder, filename="{unknown}")


@differs(
    "a score that is NaN",
    lightning="is ranked as the worst score",
    roomier="is not ranked; the last step is saved if no score was finite",
    reason="a checkpoint without a valid score is never the best checkpoint",
    expected=(True, False),
)
def checkpoint_with_the_score_nan_is_the_best(kind: Any, folder: Path) -> bool:
    class Undefined(Steps):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", torch.tensor(torch.nan))

    saves = checkpoint(kind, dirpath=folder / "saves")
    fit(kind, folder, Undefined(), val=in_order(2), enable_checkpointing=True, callbacks=[saves])
    return bool(saves.best_model_path)


@differs(
    "`save_on_exception=True`",
    lightning="saves a checkpoint of the interrupted step",
    roomier="saves the weights as `on_exception-NAME`",
    reason="a run can resume exactly only from a save point",
    expected=(["epoch=0-step=2.ckpt"], ["on_exception-epoch=0-step=2"]),
)
def checkpoints_after_an_error(kind: Any, folder: Path) -> list[str]:
    def fail(module: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise ValueError("bad batch")

    return saved_names(kind, folder, Steps(fail), save_on_exception=True)


@differs(
    "`trainer.save_checkpoint(path)` if `path` exists",
    lightning="replaces any file",
    roomier="replaces a checkpoint or an empty file; for any other file, raises an error",
    reason="a mistake in a path must not delete data",
    expected=("completes", "CheckpointError"),
)
def save_over_another_file(kind: Any, folder: Path) -> str:
    (folder / "notes.txt").write_text("notes")
    trainer = fit(kind, folder)
    return outcome(lambda: trainer.save_checkpoint(folder / "notes.txt"))


@differs(
    "the file names of checkpoints",
    lightning="depend on `CHECKPOINT_JOIN_CHAR`, `CHECKPOINT_EQUALS_CHAR` and `CHECKPOINT_NAME_LAST`",
    roomier="depend only on `filename`; with `auto_insert_metric_name=False`, it is the complete name",
    reason="one argument controls the complete name",
    expected=(True, False),
)
def names_depend_on_class_attributes(kind: Any, folder: Path) -> bool:
    return hasattr(checkpoint(kind), "CHECKPOINT_NAME_LAST")


@differs(
    "`best_model_path` and other results of `ModelCheckpoint`",
    lightning="can be assigned",
    roomier="are read-only",
    reason="the attributes describe the files that were saved",
    expected=("completes", "AttributeError"),
)
def assignment_of_the_best_path(kind: Any, folder: Path) -> str:
    return outcome(lambda: setattr(checkpoint(kind), "best_model_path", "best"))


@differs(
    '`ckpt_path="last"`',
    lightning="reads `last.ckpt`, which `save_last` writes",
    roomier="reads the newest complete checkpoint of the runs in `default_root_dir`",
    reason="a killed run can resume without further options",
    expected=(False, True),
)
def resumes_from_a_checkpoint_without_save_last(kind: Any, folder: Path) -> bool:
    fit(kind, folder, enable_checkpointing=True)
    return bool(fit(kind, folder, enable_checkpointing=True, max_epochs=2, ckpt_path="last").ckpt_path is not None)


# Hyperparameters ------------------------------------------------------------------------------------------------------


@differs(
    "hyperparameters that are not plain data, such as functions",
    lightning="are pickled, or removed from `hparams` if they cannot be pickled",
    roomier="are in `hparams`, but not in checkpoints, and a notice names them",
    reason="loading executes no code",
    expected=(False, True),
)
def hparams_contain_a_function(kind: Any, folder: Path) -> bool:
    class Activated(base_module(kind)):  # type: ignore[misc]
        def __init__(self, activation: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    module = Activated(lambda value: value)
    fit(kind, folder, module)
    return "activation" in module.hparams


@differs(
    "OmegaConf containers in `load_from_checkpoint`",
    lightning="are OmegaConf containers",
    roomier="are dicts with attribute access, and lists; an interpolation is saved as its value",
    reason="resolving an interpolation could execute code",
    expected=("DictConfig", "HyperParameters"),
)
def type_of_a_loaded_config(kind: Any, folder: Path) -> str:
    class Configured(base_module(kind)):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer = fit(kind, folder, Configured(OmegaConf.create({"net": {"width": 4}})))
    trainer.save_checkpoint(folder / "saved")
    trusts = {"weights_only": False} if kind is pl.Trainer else {}
    return type(Configured.load_from_checkpoint(folder / "saved", **trusts).hparams.config.net).__name__


@differs(
    "`save_hyperparameters` in a module that is created in the `__init__` of another module",
    lightning="also stores the arguments of the outer module",
    roomier="stores only the arguments of the inner module's `__init__`",
    reason="`load_from_checkpoint` passes the stored arguments to `__init__`",
    expected=(["outer", "width"], ["width"]),
)
def names_of_the_hyperparameters_of_a_part(kind: Any, folder: Path) -> list[str]:
    class Part(base_module(kind)):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Whole(base_module(kind)):  # type: ignore[misc]
        def __init__(self, outer: int) -> None:
            super().__init__()
            self.part = Part(2)

    return sorted(Whole(1).part.hparams)


@differs(
    "the hyperparameters of a run",
    lightning="are written to `hparams.yaml` by its loggers",
    roomier="are written to `hparams.json` in the run folder, which `hparams_file` of `load_from_checkpoint` accepts",
    reason="the hyperparameters are stored with any logger",
    expected=(["hparams.yaml"], ["hparams.json"]),
)
def files_of_hyperparameters(kind: Any, folder: Path) -> list[str]:
    class Wide(base_module(kind)):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = pl.loggers.CSVLogger(folder) if kind is pl.Trainer else True
    fit(kind, folder, Wide(4), logger=logger)
    return [path.name for path in sorted(folder.rglob("hparams*"))]


# The Trainer ----------------------------------------------------------------------------------------------------------


@differs(
    '`strategy="auto"`',
    lightning="is the default, and means one device or `ddp`",
    roomier="selects the fastest plan that fits. Without a strategy, the Trainer uses `single` for one rank and `ddp` "
    'for several ranks, and `devices="auto"` means one rank',
    reason="the planner and additional processes run only if the script requests them",
    expected=(False, True),
)
def strategy_is_planned(kind: Any, folder: Path) -> bool:
    return getattr(fit(kind, folder, strategy="auto", max_steps=1), "choice", None) is not None


@differs(
    "the callbacks `LearningRateFinder` and `BatchSizeFinder`",
    lightning="search at the start of a fit",
    roomier="raise an error; use `auto_lr_find=True`, `auto_scale_batch_size=True` or the `Tuner`",
    reason="the callbacks depend on internals of Lightning's loops",
    expected=("completes", "RoomierError"),
)
def fit_with_a_finder(kind: Any, folder: Path) -> str:
    class WithRate(Steps):
        lr = 0.1

    finder = pl.callbacks.LearningRateFinder(num_training_steps=5)
    return outcome(lambda: fit(kind, folder, WithRate(), callbacks=[finder]))


@differs(
    "`Tuner.scale_batch_size` on a CPU",
    lightning="doubles the batch size until a step fails",
    roomier="requires `memory_budget`",
    reason="the operating system kills a process without an error if the memory is full",
    expected=("completes", "RoomierError"),
)
def search_for_a_batch_size(kind: Any, folder: Path) -> str:
    class Sized(Steps):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return DataLoader(samples(), self.batch_size)

        val_dataloader = train_dataloader

    make_tuner: Any = pl.tuner.Tuner if kind is pl.Trainer else Tuner
    trainer = make_trainer(kind, folder, max_epochs=1)
    return outcome(lambda: make_tuner(trainer).scale_batch_size(Sized(), max_trials=2, steps_per_trial=1))


@differs(
    "the suggestion of `Tuner.lr_find`",
    lightning="is the rate at which the change between neighboring losses is steepest",
    roomier="is the rate at which a line fitted to the surrounding losses is steepest",
    reason="the loss of a single batch must not determine the rate",
    expected=(True, False),
)
def one_loss_determines_the_suggestion(kind: Any, folder: Path) -> bool:
    rates = [float(rate) for rate in torch.logspace(-5, 0, 100)]
    losses = [10.0 - 0.1 * max(0, index - 60) for index in range(100)]
    losses[30] = 9.0
    if kind is Trainer:
        found = LearningRateCurve(tuple(rates), tuple(losses), "exponential").suggestion()
    else:
        finder = pl.tuner.lr_finder._LRFinder("exponential", rates[0], rates[-1], 100)
        finder.results = {"lr": rates, "loss": losses}
        found = finder.suggestion()
    return found is not None and found < rates[35]


@differs(
    "`max_time`",
    lightning="adds a `Timer` to the callbacks",
    roomier="adds no callback",
    reason="the loop itself checks the elapsed time",
    expected=(1, 0),
)
def num_timers(kind: Any, folder: Path) -> int:
    callbacks = make_trainer(kind, folder, max_time="00:01:00:00").callbacks
    return sum(type(each).__name__ == "Timer" for each in callbacks)


@differs(
    "`trainer.validate_loop` and `test_loop`",
    lightning="are loop objects",
    roomier="do not exist; the AttributeError names the public attribute",
    reason="the loops are functions, not objects; only `fit_loop`, `precision_plugin` and `accelerator` exist, with "
    "the attributes that projects read",
    expected=(True, False),
)
def trainer_has_a_validate_loop(kind: Any, folder: Path) -> bool:
    return hasattr(make_trainer(kind, folder), "validate_loop")
