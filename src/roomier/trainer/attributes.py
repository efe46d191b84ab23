"""What callbacks, modules and tests read on a Trainer: names and meanings of Lightning's, nothing computed here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user
from roomier.api.callback import Callback
from roomier.api.logger import Logger
from roomier.api.module import Module
from roomier.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.eager import EagerEngine
from roomier.optim.configured import LRSchedulerConfig
from roomier.plan import Plan
from roomier.train.options import LoopOptions
from roomier.train.results import Results
from roomier.train.run import Run

if TYPE_CHECKING:  # it loads torch's sharding
    from roomier.planner.choice import Choice

STAGE_FLAGS = ("training", "validating", "testing", "predicting", "sanity_checking")


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
    estimate_steps: Callable[[], float]
    _module: Module | None

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self.run.progress.global_step if self.run else 0

    @property
    def current_epoch(self) -> int:
        return self.run.progress.epoch if self.run else 0

    @property
    def is_last_save_point(self) -> bool:
        """Whether training ends at the save point that is running."""
        return self.run is not None and self.run.is_finishing

    @property
    def results(self) -> Results:
        return Results() if self.run is None else self.run.results

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything logged so far by name."""
        return self.run.results.callback_metrics if self.run else {}

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        return self.run.results.progress_bar_metrics if self.run else {}

    @property
    def engine(self) -> EagerEngine:
        return self.needs_run("engine").engine

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.run.engine.optimizers if self.run else []

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        return self.run.schedulers.configs if self.run else []

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
    def early_stopping_callback(self) -> EarlyStopping | None:
        return next((each for each in self.callbacks if isinstance(each, EarlyStopping)), None)

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
        return self.run.num_training_batches if self.run else 0

    @property
    def num_val_batches(self) -> list[float]:
        return list(self.run.val_limits) if self.run else []

    num_test_batches = num_predict_batches = num_val_batches

    @property
    def default_root_dir(self) -> Path:
        return Path(self.options.default_root_dir or "runs")

    @property
    def keeps_files(self) -> bool:
        """Whether a fit writes a run folder."""
        return not self.options.num_dev_batches and (self.logger_is_on or self.enable_checkpointing)

    @property
    def accumulate_grad_batches(self) -> int:
        return self.plan.batch.accumulate_grad_batches

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
    def num_devices(self) -> int:
        return self.plan.parallel.devices

    def __getattr__(self, name: str) -> Any:
        # max_steps, log_every_n_steps and the other loop keywords are read as attributes.
        if name in LoopOptions.__dataclass_fields__:
            return getattr(self.options, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LoopOptions.__dataclass_fields__:
            raise RoomierError(name, value, "is fixed when a Trainer is made", "Make a new Trainer with this keyword")
        super().__setattr__(name, value)

    @property
    def is_running(self) -> bool:
        """Whether a loop of this Trainer is running now."""
        return any(getattr(self, flag) for flag in STAGE_FLAGS)

    def needs_run(self, name: str) -> Run:
        if self.run is None:
            raise RoomierError(name, None, "this Trainer has not run anything yet", "Call fit first")
        return self.run
