"""State of the last call of a Trainer (progress, data, metrics and objects of the run), available under Lightning's
names.

``docs/design/trainer.md`` lists the attributes that a user may set, and the values that differ from Lightning's values.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor
from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user
from roomier.api.datamodule import DataModule
from roomier.api.engine import Engine
from roomier.api.module import Module
from roomier.api.overrides import replace_none
from roomier.api.wrapped import network_of
from roomier.core.errors import RoomierError
from roomier.run.accumulation import Accumulation
from roomier.run.loaders import RunLoaders
from roomier.run.logged.results import Results
from roomier.run.progress import Progress
from roomier.run.run import Run, run_of
from roomier.run.settled import Request
from roomier.run.states import TrainerFn, TrainerStatus
from roomier.techniques.optim.configured import LRSchedulerConfig
from roomier.train.manual import ManualOptimizer
from roomier.trainer.lightning.batches import BatchHooks
from roomier.trainer.lightning.loops import FitLoop, PrecisionView, accelerator_of, init_module
from roomier.trainer.lightning.predicted import PredictLoop
from roomier.trainer.lightning.strategy import Strategy
from roomier.trainer.settings import Settings

if TYPE_CHECKING:  # slow import: loads torch's sharding modules
    from roomier.planner.choice import Choice


class Shown(dict[str, Any]):
    """A snapshot of metrics. Values that are assigned to a snapshot also appear in later snapshots.

    Args:
        metrics: current values by name.
        given: dict that stores the assigned values.
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


def _not_known() -> float:
    return math.inf


class LastCall(Settings):
    """The state of the last call of a Trainer. This class can be used and tested without the Trainer.

    Args:
        settings: the arguments of :class:`Settings`.

    Attributes:
        run: the run of the last call; None before the first call.
        fitted: the run of the last fit.
        choice: the plans that the planner compared for the last fit. None if the plan was given.
        shapes: copy of the module of the last fit without values, created before the module was built. None if no
            callback needs the copy.
        request: the last call, as a value object.
        datamodule: the DataModule of the last call.
        manual_optimizers: the optimizers in the form that ``Module.optimizers()`` returns.
        estimate_steps, count_training_batches: functions that compute ``estimated_stepping_batches`` and
            ``num_training_batches``, which hooks may read before the loop starts.
        loaders_of_calls: for each method, the loaders of its last call, in the order of the calls.
        num_batches_of: for each method, the number of batches of each evaluation loader in its last call.
        given_metrics: values that callbacks assigned to ``callback_metrics`` and the other dicts of metrics.
        copied_progress: if this Trainer is a copy, the progress of the original Trainer.
        log_dir: the folder of the last run.
        read_path: the checkpoint that the last call read.
        set_path: the value that the user assigned to ``ckpt_path``.
        was_interrupted: True if a signal ended the last call.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.log_dir = self.default_root_dir
        self.set_path: Path | str | None = None
        self.read_path: str | None = None
        self.was_interrupted = False
        self.forget_runs(Progress())

    def forget_runs(self, progress: Progress) -> None:
        """Reset the state of all runs. Until the next run, ``global_step`` and ``current_epoch`` return values from
        ``progress``."""
        self.run: Run | None = None
        self.fitted: Run | None = None
        self.choice: Choice | None = None
        self.shapes: Module | None = None
        self.request: Request | None = None
        self._module: Module | None = None
        self.datamodule: Any = None
        self.manual_optimizers: list[ManualOptimizer] = []
        self.estimate_steps: Callable[[], float] = _not_known
        self.count_training_batches: Callable[[], float] = _not_known
        self.loaders_of_calls: dict[str, RunLoaders] = {}
        self.num_batches_of: dict[str, list[float]] = {}
        self.given_metrics: dict[str, dict[str, Any]] = {"callback": {}, "logged": {}, "progress_bar": {}}
        self.predict_loop = PredictLoop()
        self.copied_progress = progress

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of the Trainer. The state contains the settings, the step and the epoch, but not
        the run.

        A copy that is created during a run has no callbacks and no loggers, because these objects reference open files.
        """
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied.state = replace(self.state)
        if self.is_running:
            copied.callbacks, copied.loggers, copied.file_loggers = [], [], []
        copied.forget_runs(Progress(**self.run.progress.state()) if self.run else self.copied_progress)
        return vars(copied)

    def begin_call(self, request: Request) -> None:
        """Record ``request`` as the last call, and mark the call as running."""
        self.request, self._module, self.datamodule = request, request.module, request.datamodule
        self.should_stop = self.was_interrupted = False
        replace_none(seen_by_user(request.module), Module)
        if request.datamodule is not None:
            replace_none(request.datamodule, DataModule)
        self.state.fn, self.state.status = TrainerFn(request.stage), TrainerStatus.RUNNING
        for given in self.given_metrics.values():
            given.clear()

    def show_loaders(self, data: RunLoaders) -> None:
        """Use the loaders in ``data`` for ``train_dataloader`` and the other attributes that return loaders."""
        stage = "" if self.request is None else self.request.stage
        self.loaders_of_calls.pop(stage, None)
        self.loaders_of_calls[stage] = data

    @property
    def global_step(self) -> int:
        """Number of completed optimizer steps."""
        return (self.run.progress if self.run else self.copied_progress).global_step

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs. An epoch is complete after its hooks and the following save point."""
        return self.run.current_epoch if self.run else self.copied_progress.epoch

    @property
    def ckpt_path(self) -> Path | str | None:
        """The checkpoint that the last call read. If a user sets this attribute, calls without ``ckpt_path`` read the
        assigned checkpoint."""
        return self.set_path or self.read_path

    @ckpt_path.setter
    def ckpt_path(self, path: Path | str | None) -> None:
        self.set_path, self.read_path = path, None

    @property
    def is_last_save_point(self) -> bool:
        """True if training ends at the current save point."""
        return self.run is not None and self.run.now.is_finishing

    @property
    def results(self) -> Results:
        """Logged values of the last run."""
        return Results() if self.run is None else self.run.results

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """All logged values. If a callback assigns a value, this value is returned until a value is logged under the
        same name."""
        return self._shown("callback")

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Latest value of each column in the log, even if its row has not been written yet."""
        return self._shown("logged")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Values logged with ``prog_bar=True``, as numbers. Reading the values waits for the device."""
        return self._shown("progress_bar")

    def _shown(self, what: str) -> dict[str, Any]:
        given = self.given_metrics[what]
        if self.run is None:
            return Shown(given, given)
        return Shown({**given, **getattr(self.run.results, f"{what}_metrics")}, given)

    @property
    def progress_bar_dict(self) -> dict[str, float]:
        """Alias of :attr:`progress_bar_metrics` in Lightning 1."""
        return self.progress_bar_metrics

    @property
    def engine(self) -> Engine:
        """Engine of the last run.

        Raises:
            RoomierError: no run has started.
        """
        return run_of(self, "engine").engine

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the run. In an evaluation after a fit, this attribute contains the optimizers of the fit."""
        return self._fit_or_run.engine.optimizers if self._fit_or_run else []

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        """Schedulers of the run, with their settings."""
        return self._fit_or_run.schedulers.configs if self._fit_or_run else []

    @property
    def scaler(self) -> Any:
        """Loss scale of ``"16-mixed"``; None with any other precision."""
        scaler = None if self._fit_or_run is None else self._fit_or_run.engine.scaler
        return scaler if scaler is not None and scaler.is_on else None

    @property
    def _fit_or_run(self) -> Run | None:
        return self.run if self.fitted is None else self.fitted

    @property
    def model(self) -> Any:
        """The model of the last run, in the form in which it was passed."""
        return None if self._module is None else network_of(self._module)

    @property
    def lightning_module(self) -> Any:
        """The module of the last run. For a plain ``nn.Module``, this is the Module that wraps it."""
        return None if self._module is None else seen_by_user(self._module)

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps in the complete run; infinite if the number is unknown."""
        return self.estimate_steps()

    @property
    def num_steps_in_all(self) -> float:
        """Total number of optimizer steps if the run does not end early; infinite if the number is unknown."""
        return self.run.num_steps_in_all if self.run else math.inf

    @property
    def num_training_batches(self) -> float:
        """Number of batches per epoch of the last fit; infinite before the first fit, and for a loader without a
        length."""
        return self.count_training_batches()

    @property
    def num_val_batches(self) -> list[float]:
        """Number of batches of each validation loader in the last fit or the last call of ``validate``."""
        return list(self.num_batches_of.get("validate" if self.state.fn is TrainerFn.VALIDATING else "fit", ()))

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Number of batches of each validation loader in the sanity check before training."""
        most = math.inf if self.options.num_sanity_val_steps == -1 else self.options.num_sanity_val_steps
        return [min(most, number) for number in self.num_batches_of.get("fit", ())]

    @property
    def num_test_batches(self) -> list[float]:
        """Number of batches of each test loader."""
        return list(self.num_batches_of.get("test", ()))

    @property
    def num_predict_batches(self) -> list[float]:
        """Number of batches of each prediction loader."""
        return list(self.num_batches_of.get("predict", ()))

    @property
    def train_dataloader(self) -> Any:
        """The training loader, in the form in which it was passed or defined. None before the first fit."""
        return self.seen_loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loaders, in the form in which they were passed or defined."""
        return self.seen_loaders.get("val")

    @property
    def test_dataloaders(self) -> Any:
        """The test loaders, in the form in which they were passed or defined."""
        return self.seen_loaders.get("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loaders, in the form in which they were passed or defined."""
        return self.seen_loaders.get("predict")

    @property
    def enable_validation(self) -> bool:
        """True if a fit runs validation. The value is valid after the loaders are created."""
        return self.state.fn in (TrainerFn.FITTING, TrainerFn.VALIDATING) and bool(self.num_val_batches)

    @property
    def is_last_batch(self) -> bool:
        """True if the current training batch is the last of its epoch. False if the number of batches is unknown."""
        run = self.fitted
        return run is not None and run.now.batch_idx + 1 >= run.batches.num_training

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of micro-batches per optimizer step in the current epoch."""
        return Accumulation.of(self.plan, self.callbacks).at(self.current_epoch)

    @property
    def strategy(self) -> Strategy:
        """View of the ranks and the device, with Lightning's names. ``strategy.name`` is the name of the strategy."""
        return Strategy(self)

    @property
    def fit_loop(self) -> FitLoop:
        """View of a fit, with the names of Lightning's loop."""
        return FitLoop(self)

    @property
    def precision_plugin(self) -> PrecisionView:
        """View of the precision, with the names of Lightning's plugin."""
        return PrecisionView(self)

    @property
    def accelerator(self) -> Any:
        """Object that describes the device type. If Lightning is imported, the object has Lightning's class."""
        return accelerator_of(self)

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context in which tensors are created on the device and in the dtype of the Trainer.

        Args:
            empty_init: True to leave the weights uninitialized, for example because a checkpoint is loaded next.
        """
        return init_module(self, empty_init)

    @property
    def _results(self) -> Never:
        """Attribute that ``LightningModule.log`` reads outside of a run. During a run, roomier replaces ``log``.

        Raises:
            RoomierError: always.
        """
        action = "Call log in a step or a hook of the loop"
        raise RoomierError("log", type(self.model).__name__, "cannot log outside of a step or epoch", action)

    @property
    def _data_connector(self) -> BatchHooks:
        """Attribute that ``to_onnx`` and ``to_torchscript`` of a LightningModule read."""
        return BatchHooks(self)

    @property
    def interrupted(self) -> bool:
        """True if a signal ended the last call."""
        run = self.run
        is_of_call = run is not None and run.settled.request is self.request
        return self.was_interrupted or bool(self.is_running and run and is_of_call and run.now.is_interrupted)

    @property
    def seen_loaders(self) -> dict[str, Any]:
        """The loaders that the user passed or defined. Keys: ``"train"``, ``"val"``, ``"test"``, ``"predict"``."""
        return {name: each for data in self.loaders_of_calls.values() for name, each in data.found.items()}

    @property
    def received_sigterm(self) -> bool:
        """True if the last run received SIGTERM."""
        return self.run is not None and self.run.stop.received == signal.SIGTERM

    @staticmethod
    def unwrapped_optimizer(optimizer: Any) -> Optimizer:
        """Return the torch optimizer that an element of ``Module.optimizers()`` wraps."""
        return optimizer.optimizer if isinstance(optimizer, ManualOptimizer) else optimizer
