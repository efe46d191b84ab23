"""The interface of the Trainer for hooks and library code, with Lightning's attribute names. Library code sets only
``should_stop``."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from roomier.core.ranks import Ranks
from roomier.core.world import World

if TYPE_CHECKING:
    from roomier.api.engine import Engine
    from roomier.api.logger import Logger
    from roomier.plan import Plan


class MetricsSnapshot(dict[str, Any]):
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

    update = MutableMapping.update  # calls __setitem__, unlike the method of dict


class TrainerView(Protocol):
    """The interface of the Trainer for its callbacks and modules. :class:`roomier.Trainer` derives from it.

    Attributes that follow from other attributes are defined here; the Trainer defines all others. Library code only
    reads them, which ``tests/house`` checks.

    Attributes:
        should_stop: set it to True to end training at the next save point. With several ranks, it is sufficient that
            one rank sets this attribute.
        state: method, loop and status of the last call.
        loaders_of_calls: loaders of the last call of each method.
        num_batches_of: number of batches of each evaluation loader, by method.
        datamodule: the DataModule of the last call; None if no DataModule was passed.
        options: settings of the loop.
        plan: the plan of the last run; before the first run, the requested plan.
        requested_plan: the requested plan.
        max_epochs: maximum number of epochs; None if not set.
        max_steps: maximum number of optimizer steps; -1 if unlimited.
        min_steps: minimum number of optimizer steps; None if not set.
        overfit_batches: number or fraction of batches used for training and validation; 0 if disabled.
        fast_dev_run: number of batches of a development run; False if disabled.
        check_val_every_n_epoch: number of epochs between two validations; None to count batches across epochs.
        num_sanity_val_steps: number of validation batches in the sanity check before training.
        log_every_n_steps: number of optimizer steps between consecutive rows of the log.
        run: the last run; None before the first run. Library code calls :func:`roomier.run.run.run_of`.
        fitted: the run of the last fit; None before the first fit.
        copied_progress: if this Trainer is a copy, the progress of the original Trainer.
        estimate_steps, count_training_batches: functions that compute ``estimated_stepping_batches`` and
            ``num_training_batches``, which hooks may read before the loop starts.
        shapes: a copy without values of the module of the last fit, created before the module was built. None if the
            copy is not needed or cannot be created.
        choice: the plans that the planner compared for the last fit; None if the user specified the plan.
        callbacks: all callbacks (of roomier or of Lightning), in the order of their calls.
        manual_optimizers: the optimizers for manual optimization, whose ``step`` increments ``global_step``.
        loggers: all loggers.
        given_metrics: metrics that callbacks assigned, for each kind of metrics.
        predict_loop: view of the prediction loop, with the attribute names of Lightning's loop.
        world: position of this process among all processes.
        ranks: the ranks of the last call.
        log_dir: folder of the logs.
        enable_checkpointing: True if checkpoints are enabled.
    """

    should_stop: bool

    # Progress

    @property
    def global_step(self) -> int:
        """Number of completed optimizer steps."""
        return int((self.run.progress if self.run else self.copied_progress).global_step)

    @property
    def current_epoch(self) -> int:
        """Number of completed epochs. An epoch is complete after its hooks and the following save point."""
        return int(self.run.current_epoch if self.run else self.copied_progress.epoch)

    @property
    def num_steps_in_all(self) -> float:
        """Total number of optimizer steps if the run does not end early; infinite if the number is unknown."""
        return self.run.num_steps_in_all if self.run else math.inf

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps in the full run. Can be read in ``configure_optimizers``. Infinite if unknown."""
        return self.estimate_steps()

    @property
    def is_last_batch(self) -> bool:
        """True if the current training batch is the last of its epoch. False if the number of batches is unknown."""
        run = self.fitted
        return run is not None and run.now.batch_idx + 1 >= run.batches.num_training

    @property
    def is_last_save_point(self) -> bool:
        """True if training ends at the current save point."""
        return self.run is not None and self.run.now.is_finishing

    @property
    def is_running(self) -> bool:
        """True if a loop of this Trainer is running."""
        return self.state.stage is not None

    @property
    def interrupted(self) -> bool:
        """True if a signal or an exception ended the last call."""

    @property
    def received_sigterm(self) -> bool:
        """True if the last call received SIGTERM."""
        return self.run is not None and self.run.stop.received == signal.SIGTERM

    state: Any

    @property
    def training(self) -> bool:
        """True while training steps run."""
        return bool(self.state.stage == "train")

    @property
    def validating(self) -> bool:
        """True while a validation runs."""
        return bool(self.state.stage == "validate")

    @property
    def testing(self) -> bool:
        """True while a test runs."""
        return bool(self.state.stage == "test")

    @property
    def predicting(self) -> bool:
        """True while predictions run."""
        return bool(self.state.stage == "predict")

    @property
    def sanity_checking(self) -> bool:
        """True while the sanity check (validation before training) runs."""
        return bool(self.state.stage == "sanity_check")

    @property
    def evaluating(self) -> bool:
        """True while a validation, a test or the sanity check runs."""
        return self.state.stage is not None and self.state.stage.evaluating

    # Data

    @property
    def num_training_batches(self) -> float:
        """Number of batches per epoch of the last fit on this rank. Infinite before the first fit, and for a loader
        without a length."""
        return self.count_training_batches()

    @property
    def num_val_batches(self) -> list[float]:
        """Number of batches of each validation loader in the last fit or the last call of ``validate``, for all ranks
        together."""
        return list(self.num_batches_of.get("validate" if self.state.fn == "validate" else "fit", ()))

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Number of batches of each validation loader in the sanity check before training."""
        return [min(self.options.num_sanity_val_steps, number) for number in self.num_batches_of.get("fit", ())]

    @property
    def num_test_batches(self) -> list[float]:
        """Number of batches of each test loader, for all ranks together."""
        return list(self.num_batches_of.get("test", ()))

    @property
    def num_predict_batches(self) -> list[float]:
        """Number of batches of each prediction loader, for all ranks together."""
        return list(self.num_batches_of.get("predict", ()))

    loaders_of_calls: dict[str, Any]
    num_batches_of: dict[str, list[float]]

    @property
    def seen_loaders(self) -> dict[str, Any]:
        """The loaders that the user passed or defined. Keys: ``"train"``, ``"val"``, ``"test"``, ``"predict"``."""
        return {name: each for data in self.loaders_of_calls.values() for name, each in data.found.items()}

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

    datamodule: Any

    @property
    def enable_validation(self) -> bool:
        """True if a fit runs validation. The value is valid after the loaders are created."""
        return self.state.fn in ("fit", "validate") and bool(self.num_val_batches)

    # Settings

    options: Any
    plan: Plan
    requested_plan: Plan

    @property
    def accumulate_grad_batches(self) -> int:
        """Number of micro-batches per optimizer step in the current epoch."""

    @property
    def gradient_clip_val(self) -> float | None:
        """Maximum norm or value of gradients; None if clipping is disabled."""
        return self.plan.batch.gradient_clip_val

    @property
    def gradient_clip_algorithm(self) -> str:
        """``"norm"`` or ``"value"``."""
        return self.plan.batch.gradient_clip_algorithm

    @property
    def precision(self) -> str:
        """Precision of the plan, such as ``"bf16-mixed"``."""
        return self.plan.precision.mode

    max_epochs: int | None

    @property
    def min_epochs(self) -> int | None:
        """Minimum number of epochs; None if not set."""
        return 0 if self.options.min_epochs is None and self.state.fn is not None else self.options.min_epochs

    max_steps: int
    min_steps: int | None

    @property
    def limit_train_batches(self) -> Any:
        """Number or fraction of training batches per epoch."""
        return self.options.limit_of("train")

    @property
    def limit_val_batches(self) -> Any:
        """Number or fraction of validation batches."""
        return self.options.limit_of("val")

    @property
    def limit_test_batches(self) -> Any:
        """Number or fraction of test batches."""
        return self.options.limit_of("test")

    @property
    def limit_predict_batches(self) -> Any:
        """Number or fraction of prediction batches."""
        return self.options.limit_of("predict")

    overfit_batches: int | float
    fast_dev_run: int | bool

    @property
    def val_check_interval(self) -> Any:
        """Training batches between two validations (int), fraction of an epoch (float), or time between them."""
        interval = self.options.val_check_interval
        return 1.0 if interval is None else interval

    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | float
    log_every_n_steps: int

    # Objects

    run: Any
    fitted: Any
    copied_progress: Any
    estimate_steps: Callable[[], float]
    count_training_batches: Callable[[], float]

    @property
    def engine(self) -> Engine:
        """The engine of the last run, which computes gradients and updates."""

    @property
    def model(self) -> Any:
        """The module of the last call."""

    @property
    def lightning_module(self) -> Any:
        """The module of the last call, as callbacks receive it."""

    shapes: Any
    choice: Any
    callbacks: list[Any]

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that saves checkpoints; None if no such callback exists."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> Sequence[Any]:
        """All callbacks that save checkpoints."""

    @property
    def early_stopping_callback(self) -> Any:
        """The first EarlyStopping callback; None if no such callback exists."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> Sequence[Any]:
        """All EarlyStopping callbacks."""

    @property
    def progress_bar_callback(self) -> Any:
        """The progress bar; None if no progress bar exists."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the run. In an evaluation after a fit, this attribute contains the optimizers of the fit."""
        return self._fit_or_run.engine.optimizers if self._fit_or_run else []

    manual_optimizers: list[Any]

    @property
    def lr_scheduler_configs(self) -> Sequence[Any]:
        """Schedulers of the run, with their settings."""
        return self._fit_or_run.schedulers.configs if self._fit_or_run else []

    @property
    def _fit_or_run(self) -> Any:
        return self.run if self.fitted is None else self.fitted

    @property
    def scaler(self) -> Any:
        """Loss scale of ``"16-mixed"``; None with any other precision."""
        scaler = None if self._fit_or_run is None else self._fit_or_run.engine.scaler
        return scaler if scaler is not None and scaler.is_on else None

    @property
    def strategy(self) -> Any:
        """Object that describes the ranks, with Lightning's attribute names."""

    @property
    def profiler(self) -> Any:
        """Object with Lightning's method ``profile`` for named ranges."""

    loggers: list[Logger]

    @property
    def logger(self) -> Logger | None:
        """The first logger; None if there are no loggers."""
        return self.loggers[0] if self.loggers else None

    @property
    def results(self) -> Any:
        """The logged values of the last run."""

    predict_loop: Any

    # Metrics

    given_metrics: dict[str, dict[str, Any]]

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
            return MetricsSnapshot(given, given)
        return MetricsSnapshot({**given, **getattr(self.run.results, f"{what}_metrics")}, given)

    @property
    def progress_bar_dict(self) -> dict[str, float]:
        """Same as ``progress_bar_metrics``."""
        return self.progress_bar_metrics

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write a row to the loggers at the current step."""

    def log_visual(self, method: str, key: str, value: Any, **options: Any) -> None:
        """Call ``method`` of the loggers at the current step: ``"log_image"``, ``"log_figure"`` or
        ``"log_histogram"``."""

    # Ranks and files

    world: World
    ranks: Ranks

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes."""
        return self.world.rank

    @property
    def num_data_ranks(self) -> int:
        """Number of groups of ranks that read different samples. This is :attr:`world_size`, unless several ranks
        compute parts of the same samples."""
        return self.plan.parallel.num_data_ranks

    @property
    def data_rank(self) -> int:
        """Index of the group of ranks that read the same samples as this rank, from 0 to ``num_data_ranks - 1``."""
        return self.plan.parallel.mesh_on(self.world).data.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node."""
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this node."""
        return self.world.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.plan.parallel.num_nodes

    @property
    def num_devices(self) -> int:
        """Number of devices per node."""
        return self.plan.parallel.devices

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices on this node."""
        return list(range(self.num_devices))

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.world.is_global_zero

    @property
    def default_root_dir(self) -> str:
        """Folder that contains the run folders."""

    log_dir: str

    @property
    def ckpt_path(self) -> Path | str | None:
        """The checkpoint that the last call loaded; None if it loaded no checkpoint."""

    @property
    def keeps_files(self) -> bool:
        """True if a fit writes a run folder."""

    enable_checkpointing: bool

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first rank only."""
        if self.is_global_zero:
            print(*args, **kwargs)

    @property
    def fit_loop(self) -> Any:
        """View of a fit, with the attribute names of Lightning's loop."""

    @property
    def precision_plugin(self) -> Any:
        """View of the precision, with the attribute names of Lightning's plugin."""

    @property
    def accelerator(self) -> Any:
        """Accelerator object, which describes the type of device."""

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return a context in which tensors are created on the device and in the dtype of the Trainer."""

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool | None = None,
        storage_options: None = None,
        *,
        asynchronous: bool = False,
        when_committed: Callable[[], None] | None = None,
        format: str | None = None,
    ) -> None:
        """Save the run. If a hook of a running fit calls this method, the checkpoint is written at the end of the
        step."""

    @staticmethod
    def unwrapped_optimizer(optimizer: Any) -> Optimizer:
        """Return the torch optimizer that an element of ``Module.optimizers()`` wraps."""
