"""Settings of a Trainer, with Lightning's names: arguments, callbacks, loggers, ranks, and the running loop.

``docs/design/trainer.md`` lists the attributes that a user may set, and the values that differ from Lightning's values.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from roomier.api.adapt import as_module, seen_by_user
from roomier.api.callback import LOG_METHODS, Callback
from roomier.api.forward import ForwardModule
from roomier.api.lightning_callbacks import is_builtin
from roomier.api.logger import Logger
from roomier.api.module import Module
from roomier.api.overrides import is_one, replace_none
from roomier.api.own_optimizer import OwnOptimizer, own_optimizer_of
from roomier.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from roomier.checkpoint.commit import at_home
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.launch import join
from roomier.loggers.files import FileLogger
from roomier.plan import Plan
from roomier.run.options import LoopOptions
from roomier.run.states import RunningStage, TrainerState
from roomier.train.settling.checks import check_callbacks
from roomier.trainer.keywords.arguments import kind_of, ordered, with_batch_field
from roomier.trainer.lightning.batches import NamedSpans
from roomier.trainer.lightning.callbacks import adopted
from roomier.trainer.lightning.predicted import KeepsPredicted, writes_at_end, writes_predictions
from roomier.trainer.lightning.read_folders import let_lightning_read_folders

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


class Settings:
    """The settings of a Trainer, and the loop that is running.

    Args:
        plan: the requested plan.
        logger_is_on: True if a fit writes logs.
        enable_checkpointing: True if a fit writes checkpoints by default.
        auto_lr_find, auto_scale_batch_size: searches of the tuner before a fit.
        own_optimizer: the ``optimizer`` argument, which can be an optimizer or a function that creates an optimizer.

    Attributes:
        plan: the plan of the last run; before the first run, the requested plan.
        requested_plan: the requested plan.
        ranks: the ranks of the last call. Until a call joins the other ranks, the value represents one rank.
        micro_batch: number of samples in a micro-batch on each rank, determined by the tuner. None leaves the batches
            of the loader unchanged.
        num_micro_batches: number of micro-batches per step that the tuner determined in the run that this run resumes.
        state: the method that was called last, and the loop that is running.
        should_stop: True ends training at the next save point.
    """

    barebones = False

    def __init__(
        self,
        *,
        plan: Plan,
        options: LoopOptions,
        world: World,
        callbacks: list[Callback],
        loggers: list[Logger],
        logger_is_on: bool,
        enable_checkpointing: bool,
        auto_lr_find: bool | str,
        auto_scale_batch_size: bool | str,
        own_optimizer: Any = None,
    ) -> None:
        let_lightning_read_folders()
        self.plan = self.requested_plan = plan
        self.options = options
        self.world = world
        self.ranks = Ranks()
        self.callbacks = callbacks
        self.file_loggers = [each for each in loggers if isinstance(each, FileLogger) and each.is_added]
        self.loggers = [each for each in loggers if each not in self.file_loggers]
        self.logger_is_on = logger_is_on
        self.enable_checkpointing = enable_checkpointing
        self.auto_lr_find, self.auto_scale_batch_size = auto_lr_find, auto_scale_batch_size
        self.micro_batch: int | None = None
        self.num_micro_batches: int | None = None
        self.state = TrainerState()
        self.should_stop = False
        self.own_optimizer = None if own_optimizer is None else own_optimizer_of(own_optimizer)

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
    def logger(self) -> Logger | None:
        """The first logger; None if there is no logger."""
        return self.loggers[0] if self.loggers else None

    @property
    def checkpoint_callback(self) -> Any:
        """The first ModelCheckpoint; None if there is none. A ModelCheckpoint of Lightning is returned as the object
        that the user passed."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """All ModelCheckpoint callbacks, as the objects that the user passed."""
        return [vars(each).get("seen_as", each) for each in self.callbacks if isinstance(each, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping callback of roomier or of Lightning; None if there is none."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """All EarlyStopping callbacks of roomier and of Lightning."""
        return [each for each in self.callbacks if isinstance(each, EarlyStopping) or is_builtin(each, "EarlyStopping")]

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The ProgressBar; None if there is none."""
        return next((each for each in self.callbacks if isinstance(each, ProgressBar)), None)

    @property
    def limit_train_batches(self) -> int | float:
        """Limit on training batches per epoch on each rank, as a number (int) or as a fraction (float)."""
        return self.options.limit_of("train")

    @property
    def limit_val_batches(self) -> int | float:
        """Limit on validation batches, as a number (int) or as a fraction (float)."""
        return self.options.limit_of("val")

    @property
    def limit_test_batches(self) -> int | float:
        """Limit on test batches, as a number (int) or as a fraction (float)."""
        return self.options.limit_of("test")

    @property
    def limit_predict_batches(self) -> int | float:
        """Limit on prediction batches, as a number (int) or as a fraction (float)."""
        return self.options.limit_of("predict")

    @property
    def val_check_interval(self) -> int | float:
        """Number of training batches between two validations (int), or fraction of an epoch (float)."""
        interval = self.options.val_check_interval
        return 1.0 if interval is None else interval

    @property
    def min_epochs(self) -> int | None:
        """Minimum number of epochs. As in Lightning, None is replaced by 0 in the first call."""
        return 0 if self.options.min_epochs is None and self.state.fn is not None else self.options.min_epochs

    @property
    def default_root_dir(self) -> str:
        """Folder that contains the run folders."""
        return str(at_home(self.options.default_root_dir or "runs"))

    @property
    def keeps_files(self) -> bool:
        """True if a fit writes a run folder."""
        return not self.options.num_dev_batches and (self.logger_is_on or self.enable_checkpointing)

    @property
    def gradient_clip_val(self) -> float | None:
        """Upper limit for the norm or the values of gradients; None if gradients are not clipped."""
        return self.plan.batch.gradient_clip_val

    @property
    def gradient_clip_algorithm(self) -> str:
        """Algorithm of gradient clipping: ``"norm"`` or ``"value"``."""
        return self.plan.batch.gradient_clip_algorithm

    @property
    def precision(self) -> str:
        """Precision of the plan, such as ``"bf16-mixed"``."""
        return self.plan.precision.mode

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return self.world.node_rank

    @property
    def is_global_zero(self) -> bool:
        """True if this process is rank 0."""
        return self.world.is_global_zero

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.plan.parallel.num_nodes

    @property
    def num_devices(self) -> int:
        """Number of devices on each machine."""
        return self.plan.parallel.devices

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices on this machine. Each rank uses the device whose index is its local rank."""
        return list(range(self.num_devices))

    @property
    def profiler(self) -> Any:
        """Object with Lightning's method ``profile(name)``: the profiler of actions, or spans in a torch profile."""
        own = self.options.profiler
        return NamedSpans() if own is None or isinstance(own, (str, torch.profiler.profile)) else own

    @property
    def training(self) -> bool:
        """True while the training loop runs, except during its validations."""
        return self.state.stage is RunningStage.TRAINING

    @property
    def validating(self) -> bool:
        """True during a validation."""
        return self.state.stage is RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        """True during a test."""
        return self.state.stage is RunningStage.TESTING

    @property
    def predicting(self) -> bool:
        """True during a prediction."""
        return self.state.stage is RunningStage.PREDICTING

    @property
    def sanity_checking(self) -> bool:
        """True during the validation before training."""
        return self.state.stage is RunningStage.SANITY_CHECKING

    @property
    def evaluating(self) -> bool:
        """True during a validation, a test or the sanity check."""
        return self.state.stage is not None and self.state.stage.evaluating

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
        adopted_callbacks = adopted(self.callbacks)  # the user may have added callbacks to the list
        others = [each for each in adopted_callbacks if kind_of(each) not in types]
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

    def use_next(
        self, *, plan: Plan | None = None, micro_batch: int | None = None, num_micro_batches: int | None = None
    ) -> None:
        """In the next fits, use the results of the tuner.

        Args:
            plan: plan that replaces the requested plan.
            micro_batch: number of samples per micro-batch on each rank.
            num_micro_batches: number of micro-batches per step.
        """
        if plan is not None:
            self.plan = self.requested_plan = plan
        if micro_batch is not None or num_micro_batches is not None:
            self.micro_batch, self.num_micro_batches = micro_batch, num_micro_batches

    def use_learning_rate(self, learning_rate: float | None) -> None:
        """Use ``learning_rate`` for the optimizer that the ``optimizer`` argument names."""
        self.requested_plan, self.plan = (
            dataclasses.replace(plan, optimizer=dataclasses.replace(plan.optimizer, lr=learning_rate))
            for plan in (self.requested_plan, self.plan)
        )

    def join_ranks(self) -> None:
        """Join the other ranks."""
        self.ranks = join(self.world, resolve_device(self.plan.parallel.accelerator).type)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print only on rank 0."""
        if self.is_global_zero:
            print(*args, **kwargs)

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
            super().__setattr__("options", dataclasses.replace(self.options, **{name: value}))

    @property
    def is_running(self) -> bool:
        """True if a loop of this Trainer is currently running."""
        return self.state.stage is not None
