"""What callbacks, modules and tests read on a Trainer: names and meanings of Lightning's, nothing computed here.

See ``docs/design/trainer.md`` for what may be set, and where a value differs from Lightning's and why.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor
from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user
from roomier.api.callback import Callback
from roomier.api.engine import Engine
from roomier.api.lightning_callbacks import is_builtin
from roomier.api.logger import Logger
from roomier.api.module import Module
from roomier.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from roomier.checkpoint.commit import at_home
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.optim.configured import LRSchedulerConfig
from roomier.plan import Plan
from roomier.run.accumulation import accumulation_at
from roomier.run.logged.results import Results
from roomier.run.options import LoopOptions
from roomier.run.progress import Progress
from roomier.run.run import Run
from roomier.run.states import STAGE_OF_FLAG, TrainerFn, TrainerState, TrainerStatus
from roomier.train.manual import ManualOptimizer
from roomier.trainer.keywords.arguments import with_batch_field
from roomier.trainer.lightning.batches import BatchHooks, NamedSpans
from roomier.trainer.lightning.predicted import PredictLoop
from roomier.trainer.lightning.strategy import Strategy

if TYPE_CHECKING:  # it loads torch's sharding
    from roomier.planner.choice import Choice

STAGE_FLAGS = tuple(STAGE_OF_FLAG)
_OF_PLAN = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_WITHIN_A_RUN = {
    "accumulate_grad_batches": "Use callbacks=[GradientAccumulationScheduler(scheduling={epoch: number})]",
    "max_epochs": "Set it before fit, or end the run with should_stop = True",
}
_INSTEAD = {
    "fit_loop": "Read current_epoch, global_step, num_training_batches, is_last_batch; set max_epochs between two fits",
    "validate_loop": "Read num_val_batches, val_dataloaders, callback_metrics",
    "test_loop": "Read num_test_batches, test_dataloaders, callback_metrics",
    "accelerator": "Read strategy.root_device",
    "precision_plugin": "Read precision",
    "tuner": "Use Trainer(auto_lr_find=True)",
    "init_module": "Make large layers in the module's configure_model",
}
"""What Lightning's Trainer has and roomier's has not: where it is found."""


class Shown(dict[str, Any]):
    """Metrics by name, as they are when it is made. What is put into it, the next one has as well.

    Args:
        given: where that is kept.
    """

    def __init__(self, metrics: Mapping[str, Any], given: dict[str, Any]) -> None:
        super().__init__(metrics)
        self._given = given

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._given[name] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def without_runs(copied_progress: Progress) -> dict[str, Any]:
    """What stands, by the name of the attribute, on a Trainer that has not run anything."""
    return {
        "run": None,
        "fitted": None,
        "_module": None,
        "datamodule": None,
        "choice": None,
        "shapes": None,
        "manual_optimizers": [],
        "estimate_steps": _not_known,
        "count_training_batches": _not_known,
        "seen_loaders": {},
        "num_batches_of": {},
        "given_metrics": {name: {} for name in ("callback", "logged", "progress_bar")},
        "predict_loop": PredictLoop(),
        "copied_progress": copied_progress,
    }


def _not_known() -> float:
    return math.inf


class TrainerAttributes:
    """The reading half of :class:`roomier.Trainer`, which sets what is declared here."""

    plan: Plan
    """What runs; with ``strategy="auto"`` what was chosen, once a fit began."""
    asked_plan: Plan
    """What the keywords said."""
    choice: Choice | None
    """What the planner looked at for the last fit; None where nothing was to be planned."""
    shapes: Module | None
    """The model of the last fit before it was built, without values; None where nobody will ask for it."""
    options: LoopOptions
    world: World
    ranks: Ranks
    callbacks: list[Callback]
    loggers: list[Logger]
    logger_is_on: bool
    enable_checkpointing: bool
    run: Run | None
    fitted: Run | None
    copied_progress: Progress
    """Where the Trainer stood that this one is a copy of."""
    datamodule: Any
    manual_optimizers: list[ManualOptimizer]
    estimate_steps: Callable[[], float]
    auto_lr_find: bool | str
    auto_scale_batch_size: bool | str
    micro_batch: int | None
    """Samples of a micro-batch on each rank, where the tuner found them; None: those of the loader."""
    num_micro_batches: int | None
    """Of a step, where the tuner found them in the run that is gone on with."""
    count_training_batches: Callable[[], float]
    called: TrainerFn | None
    """The method that was called last."""
    status: TrainerStatus
    seen_loaders: dict[str, Any]
    """What the user passed or defined, by ``"train"``, ``"val"``, ``"test"``, ``"predict"``."""
    num_batches_of: dict[str, list[float]]
    """Batches of each evaluation loader, by the method that was called."""
    given_metrics: dict[str, dict[str, Any]]
    """What callbacks put into ``callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics``."""
    predict_loop: PredictLoop
    read_path: str | None
    """The checkpoint that the last call read."""
    set_path: Path | str | None
    """What the user set ``ckpt_path`` to."""
    _module: Module | None
    barebones = False
    reload_dataloaders_every_n_epochs = 0

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return (self.run.progress if self.run else self.copied_progress).global_step

    @property
    def current_epoch(self) -> int:
        return (self.run.progress if self.run else self.copied_progress).epoch

    @property
    def ckpt_path(self) -> Path | str | None:
        """The checkpoint that the last call read. Set, it is that of each call that is given none, until it is None."""
        return self.set_path or self.read_path

    @ckpt_path.setter
    def ckpt_path(self, path: Path | str | None) -> None:
        self.set_path, self.read_path = path, None

    @property
    def is_last_save_point(self) -> bool:
        """Whether training ends at the save point that is running."""
        return self.run is not None and self.run.is_finishing

    @property
    def results(self) -> Results:
        return Results() if self.run is None else self.run.results

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything logged so far by name, of a sanity check while it runs. What is put into it stays until it is
        logged."""
        return self._shown("callback")

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What the loggers got last, or get next, by name."""
        return self._shown("logged")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What was logged with ``prog_bar=True``, as numbers: reading it waits for the device."""
        return self._shown("progress_bar")

    def _shown(self, what: str) -> dict[str, Any]:
        given = self.given_metrics[what]
        if self.run is None:
            return Shown(given, given)
        return Shown({**given, **getattr(self.run.results, f"{what}_metrics")}, given)

    @property
    def progress_bar_dict(self) -> dict[str, float]:
        """As Lightning 1 called :attr:`progress_bar_metrics`."""
        return self.progress_bar_metrics

    @property
    def engine(self) -> Engine:
        return self.needs_run("engine").engine

    @property
    def optimizers(self) -> list[Optimizer]:
        """Of the run; in an evaluation after a fit, those of the fit."""
        return self._fit_or_run.engine.optimizers if self._fit_or_run else []

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        return self._fit_or_run.schedulers.configs if self._fit_or_run else []

    @property
    def scaler(self) -> Any:
        """The loss scale of ``"16-mixed"``, else None."""
        scaler = None if self._fit_or_run is None else self._fit_or_run.engine.scaler
        return scaler if scaler is not None and scaler.is_on else None

    @property
    def _fit_or_run(self) -> Run | None:
        return self.run if self.fitted is None else self.fitted

    @property
    def model(self) -> Any:
        """The module of the last run; a LightningModule is given back as it is."""
        return None if self._module is None else seen_by_user(self._module)

    @property
    def lightning_module(self) -> Any:
        return self.model

    @property
    def logger(self) -> Logger | None:
        return self.loggers[0] if self.loggers else None

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        return [each for each in self.callbacks if isinstance(each, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> Any:
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """roomier's, and Lightning's."""
        return [each for each in self.callbacks if isinstance(each, EarlyStopping) or is_builtin(each, "EarlyStopping")]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        return next((each for each in self.callbacks if isinstance(each, ProgressBar)), None)

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole run; infinite where it is not known."""
        return self.estimate_steps()

    @property
    def num_steps_in_all(self) -> float:
        """Optimizer steps done and still to do if nothing ends the run early; infinite where that is not known."""
        return self.run.num_steps_in_all if self.run else math.inf

    @property
    def num_training_batches(self) -> float:
        """Batches of an epoch of the last fit, ``configure_optimizers`` in it included; infinite before it, and where a
        loader has no length."""
        return self.count_training_batches()

    @property
    def num_val_batches(self) -> list[float]:
        """Of each validation loader; of the fit, unless ``validate`` was called last."""
        return list(self.num_batches_of.get("validate" if self.called is TrainerFn.VALIDATING else "fit", ()))

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Of each validation loader, before training begins."""
        most = math.inf if self.options.num_sanity_val_steps == -1 else self.options.num_sanity_val_steps
        return [min(most, number) for number in self.num_batches_of.get("fit", ())]

    @property
    def num_test_batches(self) -> list[float]:
        return list(self.num_batches_of.get("test", ()))

    @property
    def num_predict_batches(self) -> list[float]:
        return list(self.num_batches_of.get("predict", ()))

    @property
    def train_dataloader(self) -> Any:
        """What fit reads, as it was passed or defined; None before."""
        return self.seen_loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        return self.seen_loaders.get("val")

    @property
    def test_dataloaders(self) -> Any:
        return self.seen_loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        return self.seen_loaders.get("predict")

    @property
    def enable_validation(self) -> bool:
        """Whether there is a ``validation_step``, and data for it; known once the loaders are made."""
        return self.called in (TrainerFn.FITTING, TrainerFn.VALIDATING) and bool(self.num_val_batches)

    @property
    def is_last_batch(self) -> bool:
        """Whether the training batch at hand is the last of its epoch; not known of loaders without a length."""
        run = self.fitted
        return run is not None and run.batch_idx + 1 >= run.num_training_batches

    @property
    def limit_train_batches(self) -> int | float:
        return self.options.limit_of("train")

    @property
    def limit_val_batches(self) -> int | float:
        return self.options.limit_of("val")

    @property
    def limit_test_batches(self) -> int | float:
        return self.options.limit_of("test")

    @property
    def limit_predict_batches(self) -> int | float:
        return self.options.limit_of("predict")

    @property
    def val_check_interval(self) -> int | float:
        interval = self.options.val_check_interval
        return 1.0 if interval is None else interval

    @property
    def min_epochs(self) -> int | None:
        return 0 if self.options.min_epochs is None and self.called is not None else self.options.min_epochs

    @property
    def default_root_dir(self) -> str:
        return str(at_home(self.options.default_root_dir or "runs"))

    @property
    def keeps_files(self) -> bool:
        """Whether a fit writes a run folder."""
        return not self.options.num_dev_batches and (self.logger_is_on or self.enable_checkpointing)

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of a step in the running epoch."""
        return accumulation_at(self, self.current_epoch)  # type: ignore[arg-type]  # the reading half of it

    @property
    def gradient_clip_val(self) -> float | None:
        return self.plan.batch.gradient_clip_val

    @property
    def gradient_clip_algorithm(self) -> str:
        return self.plan.batch.gradient_clip_algorithm

    @property
    def precision(self) -> str:
        return self.plan.precision.mode

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def global_rank(self) -> int:
        return self.world.rank

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        return self.world.node_rank

    @property
    def is_global_zero(self) -> bool:
        return self.world.is_global_zero

    @property
    def num_nodes(self) -> int:
        return self.plan.parallel.num_nodes

    @property
    def num_devices(self) -> int:
        """Of each node."""
        return self.plan.parallel.devices

    @property
    def device_ids(self) -> list[int]:
        """Of this node: each process has the device of its local rank."""
        return list(range(self.num_devices))

    @property
    def strategy(self) -> Strategy:
        """What Lightning's callbacks and modules ask of the ranks; what it is called says ``strategy.name``."""
        return Strategy(self)

    @property
    def profiler(self) -> NamedSpans:
        return NamedSpans()

    @property
    def _results(self) -> Never:
        """Asked by the own ``log`` of a LightningModule, which a run has lent another.

        Raises:
            RoomierError: always: no run is going on with it.
        """
        action = "Log from a step or a hook of the loop"
        raise RoomierError("log", type(self.model).__name__, "no step or epoch is running", action)

    @property
    def _data_connector(self) -> BatchHooks:
        """Asked by a LightningModule's ``to_onnx`` and ``to_torchscript``."""
        return BatchHooks(self)

    @property
    def state(self) -> TrainerState:
        stage = next((stage for flag, stage in STAGE_OF_FLAG.items() if getattr(self, flag)), None)
        return TrainerState(self.called, stage, self.status)

    @property
    def evaluating(self) -> bool:
        return bool(self.validating or self.testing or self.sanity_checking)

    @property
    def received_sigterm(self) -> bool:
        return self.run is not None and self.run.stop.received == signal.SIGTERM

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first rank alone."""
        if self.is_global_zero:
            print(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # max_steps, log_every_n_steps and the other loop keywords are read as attributes.
        if name in LoopOptions.__dataclass_fields__:
            return getattr(self.options, name)
        instead = f". {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_PLAN or name in LoopOptions.__dataclass_fields__:
            self._set_for_next_run(name, value)
        else:
            super().__setattr__(name, value)

    def _set_for_next_run(self, name: str, value: Any) -> None:
        """Between two runs a keyword of the loop may change, checked as one that is passed.

        Raises:
            RoomierError: a run is going on, or the value is wrong.
        """
        if self.is_running:
            action = _WITHIN_A_RUN.get(name, "Set it before fit, or between two fits; should_stop ends the run")
            raise RoomierError(name, value, "cannot change while a run goes on", action)
        if name in _OF_PLAN:
            self.asked_plan = self.plan = with_batch_field(self.asked_plan, name, value)
        else:
            super().__setattr__("options", dataclasses.replace(self.options, **{name: value}))

    @property
    def is_running(self) -> bool:
        """Whether a loop of this Trainer is running now."""
        return any(getattr(self, flag) for flag in STAGE_FLAGS)

    def needs_run(self, name: str) -> Run:
        if self.run is None:
            raise RoomierError(name, None, "this Trainer has not run anything yet", "Call fit first")
        return self.run
