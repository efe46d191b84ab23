"""The attributes of a Trainer, with Lightning's names: its settings, and the state of its last call.

``docs/design/trainer.md`` lists the attributes that a user may set, and the values that differ from Lightning's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import torch
from torch.optim import Optimizer

from roomier.api.adapt import as_module, seen_by_user
from roomier.api.callback import LOG_METHODS, Callback
from roomier.api.datamodule import DataModule
from roomier.api.engine import Engine
from roomier.api.forward import ForwardModule
from roomier.api.module import Module, network_of
from roomier.api.overrides import is_builtin, is_one, replace_none
from roomier.api.trainer_view import TrainerView
from roomier.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from roomier.checkpoint.commit import at_home
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.launch.ray_run import default_root
from roomier.loggers.by_name import loggers_from_flag
from roomier.loggers.files import FileLogger
from roomier.plan import Plan
from roomier.run.accumulation import Accumulation
from roomier.run.loaders import RunLoaders
from roomier.run.logged.results import Results
from roomier.run.options import LoopOptions
from roomier.run.progress import Progress
from roomier.run.run import Run, run_of
from roomier.run.settled import Fitted, Request
from roomier.run.states import TrainerFn, TrainerState, TrainerStatus
from roomier.storage.mirror import local_of
from roomier.train.manual import ManualOptimizer
from roomier.train.settling.checks import check_callbacks
from roomier.trainer.keywords.arguments import (
    OwnOptimizer,
    Resized,
    callbacks_of,
    kind_of,
    ordered,
    own_optimizer_of,
    with_batch_field,
)
from roomier.trainer.lightning.callbacks import adopted
from roomier.trainer.lightning.checkpoints import let_lightning_read_folders
from roomier.trainer.lightning.views import (
    BatchHooks,
    FitLoop,
    KeepsPredicted,
    NamedSpans,
    PrecisionView,
    PredictLoop,
    Strategy,
    accelerator_of,
    init_module,
    writes_at_end,
    writes_predictions,
)

if TYPE_CHECKING:  # slow import: loads torch's sharding modules
    from roomier.planner.choice import Choice


_OF_PLAN = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_WITHIN_A_RUN = {
    "accumulate_grad_batches": "Use callbacks=[GradientAccumulationScheduler(scheduling={epoch: number})]",
    "max_epochs": "Set it before fit, or end the run with should_stop = True",
}
_INSTEAD = {
    "validate_loop": "Read num_val_batches, val_dataloaders and callback_metrics",
    "test_loop": "Read num_test_batches, test_dataloaders and callback_metrics",
    "tuner": "Use Trainer(auto_lr_find=True)",
}
"""Attributes of Lightning's Trainer that roomier's Trainer does not have, with their replacements."""


class TrainerAttributes(TrainerView):
    """The attributes of a Trainer: its settings, and the state of its last call.

    The functions of one call (``session.py``) read and assign these attributes. This class can be used and tested
    without the methods of the Trainer.

    Args:
        given: the names and values of all arguments of the Trainer.
        plan: the requested plan.
        world: position of this process among all processes.

    Attributes:
        logger_is_on: True if a fit writes logs.
        enable_checkpointing: True if a fit writes checkpoints by default.
        auto_lr_find, auto_scale_batch_size: searches of the tuner before a fit.
        own_optimizer: the ``optimizer`` argument if it is an optimizer or a function that creates an optimizer.
        plan: the plan of the last run; before the first run, the requested plan.
        requested_plan: the requested plan.
        resized: sizes that replace the requested ones in ``requested_plan`` if the job was restarted. None if the
            requested sizes suit the ranks, or after the check.
        ranks: the ranks of the last call. Until a call joins the other ranks, the value represents one rank.
        micro_batch: number of samples in a micro-batch on each rank, determined by the tuner. None leaves the batches
            of the loader unchanged.
        num_micro_batches: number of micro-batches per step that the tuner determined in the run that this run resumes.
        state: the method that was called last, and the loop that is running.
        should_stop: True ends training at the next save point.
        run: the run of the last call; None before the first call.
        fitted: the run of the last fit.
        known_fit: results of the last fit if it ran on the ranks of a notebook.
        is_in_notebook: True if this process only starts the ranks and receives their results.
        choice: the plans that the planner compared for the last fit. None if the plan was given.
        shapes: copy of the module of the last fit without values, created before the module was built. None if no
            callback needs the copy.
        request: the last call, as a value object.
        datamodule: the DataModule of the last call.
        manual_optimizers: the optimizers in the form that ``Module.optimizers()`` returns.
        loaders_of_calls: for each method, the loaders of its last call, in the order of the calls.
        num_batches_of: for each method, the number of batches of each evaluation loader in its last call.
        given_metrics: values that callbacks assigned to ``callback_metrics`` and the other dicts of metrics.
        log_dir: the folder of the last run.
        read_path: the checkpoint that the last call read.
        set_path: the value that the user assigned to ``ckpt_path``.
        was_interrupted: True if a signal or an exception ended the last call.
    """

    barebones = False

    # fields of LoopOptions, which __getattr__ reads and __setattr__ replaces
    max_epochs: int | None
    max_steps: int
    min_steps: int | None
    overfit_batches: int | float
    fast_dev_run: int | bool
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | float
    log_every_n_steps: int

    def __init__(self, given: Mapping[str, Any], plan: Plan, world: World) -> None:
        let_lightning_read_folders()
        self.plan = self.requested_plan = plan
        self.world = world
        self.ranks = Ranks()
        self.options = LoopOptions(**{name: given[name] for name in LoopOptions.__dataclass_fields__})
        is_dev_run = bool(self.options.num_dev_batches)
        self.enable_checkpointing = given["enable_checkpointing"] and not is_dev_run
        self.callbacks = ordered(callbacks_of(given, self.enable_checkpointing))
        check_callbacks(self.callbacks)
        self.logger_is_on = bool(given["logger"])
        loggers = loggers_from_flag(given["logger"], is_dev_run=is_dev_run)
        self.file_loggers = [each for each in loggers if isinstance(each, FileLogger) and each.is_added]
        self.loggers = [each for each in loggers if each not in self.file_loggers]
        self.auto_lr_find: bool | str = given["auto_lr_find"]
        self.auto_scale_batch_size: bool | str = given["auto_scale_batch_size"]
        self.micro_batch: int | None = None
        self.num_micro_batches: int | None = None
        self.state = TrainerState()
        self.should_stop = False
        self.own_optimizer = None if given["optimizer"] is None else own_optimizer_of(given["optimizer"])
        self.log_dir = str(local_of(at_home(self.default_root_dir)))
        self.is_in_notebook = False
        self.resized: Resized | None = None
        self.set_path: Path | str | None = None
        self.read_path: str | None = None
        self.was_interrupted = False
        self.forget_runs(Progress())

    def forget_runs(self, progress: Progress) -> None:
        """Reset the state of all runs. Until the next run, ``global_step`` and ``current_epoch`` return values from
        ``progress``."""
        self.run: Run | None = None
        self.fitted: Run | None = None
        self.known_fit: Fitted | None = None
        self.choice: Choice | None = None
        self.shapes: Module | None = None
        self.request: Request | None = None
        self._module: Module | None = None
        self.datamodule: Any = None
        self.manual_optimizers: list[ManualOptimizer] = []
        self.estimate_steps: Callable[[], float] = partial(float, math.inf)
        self.count_training_batches: Callable[[], float] = partial(float, math.inf)
        self.loaders_of_calls: dict[str, RunLoaders] = {}
        self.num_batches_of: dict[str, list[float]] = {}
        self.given_metrics: dict[str, dict[str, Any]] = {"callback": {}, "logged": {}, "progress_bar": {}}
        self.predict_loop = PredictLoop()
        self.copied_progress = progress

    def continue_from(self, module: Module | None, datamodule: Any, known_fit: Fitted | None) -> None:
        """Continue after calls that ran in other processes.

        Args:
            module: module of the last call.
            datamodule: DataModule of the last call.
            known_fit: results of the last fit.
        """
        self._module, self.datamodule, self.known_fit = module, datamodule, known_fit

    @property
    def last_module(self) -> Module | None:
        """Module of the last call."""
        return self._module

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

    def module_of(self, model: Any) -> Module:
        """Return ``model`` as a Module, with the optimizer that was passed to the Trainer.

        Raises:
            RoomierError: the model is not supported, or it has ``configure_optimizers`` and an optimizer was passed.
        """
        module = as_module(model)
        if self.own_optimizer is not None:
            if not isinstance(module, ForwardModule):
                problem = "is supported only for a model without configure_optimizers"
                action = "Return it from configure_optimizers, or pass a name such as 'adamw'"
                raise RoomierError("optimizer", self.own_optimizer, problem, action)
            own = OwnOptimizer(module.network, self.own_optimizer)
            vars(module)["configure_optimizers"] = partial(own.configure, module.network)
        return module

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """All ModelCheckpoint callbacks, as the objects that the user passed."""
        return [vars(each).get("seen_as", each) for each in self.callbacks if isinstance(each, ModelCheckpoint)]

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All EarlyStopping callbacks of roomier and of Lightning."""
        return [each for each in self.callbacks if isinstance(each, EarlyStopping) or is_builtin(each, "EarlyStopping")]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The ProgressBar; None if there is none."""
        return next((each for each in self.callbacks if isinstance(each, ProgressBar)), None)

    @property
    def default_root_dir(self) -> str:
        """Folder or address that contains the run folders."""
        return str(at_home(self.options.default_root_dir or default_root()))

    @property
    def keeps_files(self) -> bool:
        """True if a fit writes a run folder."""
        return not self.options.num_dev_batches and (self.logger_is_on or self.enable_checkpointing)

    @property
    def profiler(self) -> Any:
        """Object with Lightning's method ``profile(name)``: the profiler of actions, or spans in a torch profile."""
        own = self.options.profiler
        return NamedSpans() if own is None or isinstance(own, (str, torch.profiler.profile)) else own

    def add_callbacks_of(self, module: Module) -> None:
        """Add the callbacks that ``module.configure_callbacks()`` returns. These callbacks replace existing callbacks
        of the same type.

        Raises:
            RoomierError: the method did not return a callback or a list of callbacks.
        """
        own = module.configure_callbacks()
        if own is not None and not (isinstance(own, (list, tuple)) or is_one(own, Callback)):
            action = "Return a list of instances of subclasses of roomier.Callback"
            raise RoomierError("configure_callbacks", own, "did not return a list of callbacks", action)
        own = adopted([own] if is_one(own, Callback) else list(own or ()))
        types = {kind_of(each) for each in own}
        # the user may have added callbacks to the list
        others = [each for each in adopted(self.callbacks) if kind_of(each) not in types]
        self.callbacks = ordered(others + own)
        check_callbacks(self.callbacks)
        for each in self.callbacks:  # as in Lightning, callbacks log like the module
            replace_none(each, Callback)
            lent = {name: getattr(seen_by_user(module), name) for name in LOG_METHODS if not hasattr(type(each), name)}
            vars(each).update(lent)

    def hooked_callbacks(self, stage: str) -> list[Any]:
        """Return the callbacks whose hooks ``stage`` calls, including the callback that prediction writers require."""
        writers = [each for each in self.callbacks if writes_predictions(each)] if stage == "predict" else []
        if not writers:
            return self.callbacks
        return [KeepsPredicted(until_end=any(map(writes_at_end, writers))), *self.callbacks]

    def use_learning_rate(self, learning_rate: float | None) -> None:
        """Use ``learning_rate`` for the optimizer that the ``optimizer`` argument names."""
        self.requested_plan, self.plan = (
            replace(plan, optimizer=replace(plan.optimizer, lr=learning_rate))
            for plan in (self.requested_plan, self.plan)
        )

    # State of the last call ----------------------------------------------------------------------------------------

    @property
    def ckpt_path(self) -> Path | str | None:
        """The checkpoint that the last call read. If a user sets this attribute, calls without ``ckpt_path`` read the
        assigned checkpoint."""
        return self.set_path or self.read_path

    @ckpt_path.setter
    def ckpt_path(self, path: Path | str | None) -> None:
        self.set_path, self.read_path = path, None

    @property
    def results(self) -> Results:
        """Logged values of the last run."""
        return Results() if self.run is None else self.run.results

    @property
    def engine(self) -> Engine:
        """Engine of the last run.

        Raises:
            RoomierError: no run has started.
        """
        return run_of(self, "engine").engine

    @property
    def model(self) -> Any:
        """The model of the last run, in the form in which it was passed."""
        return None if self._module is None else network_of(self._module)

    @property
    def lightning_module(self) -> Any:
        """The module of the last run. For a plain ``nn.Module``, this is the Module that wraps it."""
        return None if self._module is None else seen_by_user(self._module)

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
        """True if a signal or an exception ended the last call."""
        run = self.run
        is_of_call = run is not None and run.settled.request is self.request
        return self.was_interrupted or bool(self.is_running and run and is_of_call and run.now.is_interrupted)

    @staticmethod
    def unwrapped_optimizer(optimizer: Any) -> Optimizer:
        """Return the torch optimizer that an element of ``Module.optimizers()`` wraps."""
        return optimizer.optimizer if isinstance(optimizer, ManualOptimizer) else optimizer

    # Attributes that are arguments --------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # arguments of the loops, such as max_steps, are attributes
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
        """Set an argument between two runs, and validate it in the same way as a constructor argument.

        Raises:
            RoomierError: a run is active, or the value is invalid.
        """
        if self.is_running:
            action = _WITHIN_A_RUN.get(
                name, "Set it before fit or between two fits, or set should_stop=True to end the run"
            )
            raise RoomierError(name, value, "cannot be changed during a run", action)
        if name in _OF_PLAN:
            self.requested_plan = self.plan = with_batch_field(self.requested_plan, name, value)
        else:
            super().__setattr__("options", self.options.changed(name, value))
