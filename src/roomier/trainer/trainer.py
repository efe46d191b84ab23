"""The Trainer, with its arguments and the methods that a user calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import nn
from torch.optim import Optimizer

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.logger import Logger
from roomier.api.overrides import LightningCallback, LightningLogger, is_one
from roomier.core.errors import PlanError, RoomierError
from roomier.core.keywords import explain_unknown_keywords, refuse_keywords
from roomier.core.log import notice
from roomier.launch import place, present_launch
from roomier.launch.start import is_interactive
from roomier.plan import Plan
from roomier.run.options import DEFAULT_HANG_TIMEOUT, check_flag
from roomier.run.run import run_of
from roomier.run.visuals import log_visual
from roomier.train.evaluate import evaluate
from roomier.train.fit import fit
from roomier.train.opening.open_run import LOADER_NAMES, end_fit, start_fit
from roomier.train.predict_stream import opened_stream
from roomier.train.saving.save import save_checkpoint
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.in_notebook import call_in_notebook
from roomier.trainer.keywords.arguments import (
    FORMER_ARGUMENTS,
    FORMER_KEYWORDS,
    HARMLESS_KEYWORDS,
    Resized,
    check_weights_only,
    plan_of,
    resized_plan,
    with_defaults,
)
from roomier.trainer.keywords.other_libraries import of_roomier
from roomier.trainer.lightning.checkpoints import save_lightning_file, saves_file
from roomier.trainer.lightning.views import PredictLoop
from roomier.trainer.report import by_loader, metrics_table, report_end
from roomier.trainer.session import request_of, session
from roomier.trainer.survival import continued
from roomier.trainer.tuner.before_fit import check_flags, tune, write_picture
from roomier.trainer.tuner.trial import Subject

if TYPE_CHECKING:
    OptimizerArgument = dict[str, Any] | str | Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None
else:  # the command line reads this type, and accepts a name or a dict
    OptimizerArgument = dict[str, Any] | str | None


_COMPLETE = "is not supported in a notebook, which receives the predictions of its ranks when all are complete"


class Trainer(TrainerAttributes):
    """Trains, validates and tests a model, and runs predictions with it, on one device or on many ranks.

    The Trainer combines its arguments into a :class:`roomier.Plan`, which is validated immediately, printed when a run
    starts, and stored in each checkpoint. Arguments of Lightning's Trainer have the same meaning.

    Example:
        >>> trainer = roomier.Trainer(max_epochs=3, devices=4, strategy="zero2", precision="bf16-mixed")
        >>> trainer.fit(module, train_loader, val_loader)
        >>> trainer.test(module, test_loader, ckpt_path="best")

    A class name in parentheses, such as ``OptimizerPlan``, is the class in ``roomier.plan`` that lists the values.

    Args:
        plan: a Plan, a mapping that contains its sections, or the path of a YAML or JSON file. A plan cannot be
            combined with arguments that set a field of the Plan.
        strategy: how the model is distributed across ranks. The value is a name such as ``"single"``, ``"ddp"``,
            ``"zero2"`` or ``"auto"``, or a dict with ``name`` and further settings: ``{"name": "hsdp", "shard_size":
            4}``. The dict ``{"name": "auto", "allow": ["bf16-mixed"]}`` allows choices that are not exact. None means
            ``"single"`` for one rank and ``"ddp"`` for several ranks (``ParallelPlan``, ``ChoicePlan``).
        accelerator: type of device (``ParallelPlan``).
        devices: number of ranks on each machine. ``"auto"`` uses the number of ranks that torchrun, SLURM or MPI
            started. Without a launcher, a strategy for several ranks uses all accelerators (``ParallelPlan``).
        num_nodes: number of machines. ``"auto"`` uses the machines that the launcher provides (``ParallelPlan``).
        precision: number format of weights and matmuls, such as ``"bf16-mixed"`` (``PrecisionPlan``).
        matmul_precision: precision of float32 matmuls (``PrecisionPlan``).
        optimizer: name of the optimizer, or a dict with ``name`` and options: ``{"name": "adamw", "eps": 1e-6}``. None
            uses ``configure_optimizers`` (``OptimizerPlan``). For a model without this method, the value can also be an
            optimizer, or a function that creates the optimizer from the list of parameters.
        learning_rate: learning rate of the named optimizer (``OptimizerPlan``).
        lr_schedule: name of a schedule, or a dict with ``name`` and settings such as
            ``warmup_steps`` (``OptimizerPlan``).
        step_in_backward: update each parameter in the backward pass. True means ``"exact"`` (``OptimizerPlan``).
        activation_checkpointing: activations to recompute in the backward pass. The value is a policy such as
            ``"full"``, a dict such as ``{"every_n": 3}``, or a budget for the peak memory of a step, in bytes
            (``"6GiB"``) or as a fraction (0.5). True means ``"full"`` (``ActivationPlan``).
        offload: tensors to store in host memory or on disk, such as ``{"optimizer_states": "disk"}`` (``OffloadPlan``).
        chunked_loss: compute the loss of a language model in chunks of this number of tokens (``LossPlan``).
        attention: kernel of ``scaled_dot_product_attention`` (``AttentionPlan``).
        lora: rank of low-rank adapters on a frozen model, or a dict such as ``{"rank": 8}`` (``AdapterPlan``).
        compile: compile each block with ``torch.compile``. A dict sets ``backend`` and ``mode`` (``CompilePlan``).
        memory_budget: limit on a device's peak memory, such as ``"22GiB"``. None uses all memory (``ChoicePlan``).
        accumulate_grad_batches: number of micro-batches per optimizer step (``BatchPlan``).
        gradient_clip_val: limit on the gradient norm or on each element. None and 0 disable clipping (``BatchPlan``).
        gradient_clip_algorithm: clip by ``"norm"`` (the default) or by ``"value"`` (``BatchPlan``).
        seeding: seeds of the random numbers in a step, such as dropout masks: ``"stream"`` or
            ``"events"`` (``BatchPlan``). None means ``"events"`` with context or pipeline parallelism, otherwise
            ``"stream"``.
        auto_lr_find: search for a learning rate on a copy of the model before a fit. A string is the name of the
            module's attribute that contains the learning rate.
        auto_scale_batch_size: before a fit, search for the largest micro-batch that fits in memory. The number of
            samples per step is unchanged. ``"power"`` (True) doubles the size as long as the micro-batch fits;
            ``"binsearch"`` also searches between the last size that fits and the first that does not.
        max_epochs: maximum number of epochs. -1 means no limit. The default is 1000 if no other limit is set.
        min_epochs: minimum number of epochs.
        max_steps: maximum number of optimizer steps. -1 means no limit.
        min_steps: minimum number of optimizer steps.
        max_time: maximum training time, as ``"DD:HH:MM:SS"``, a ``timedelta``, or a dict of its keyword arguments.
        limit_train_batches: maximum number (int) or fraction (float) of the batches that each rank reads in an epoch.
        limit_val_batches: maximum number (int) or fraction (float) of the batches of a validation, over all ranks. 0
            disables validation.
        limit_test_batches: maximum number or fraction of the batches of a test, as in ``limit_val_batches``.
        limit_predict_batches: maximum number or fraction of the batches of a prediction, as in ``limit_val_batches``.
        overfit_batches: number (int) or fraction (float) of the batches of each training and validation loader that a
            fit uses, in a fixed order. 0.0 disables this option.
        fast_dev_run: number of batches that each loop runs, without logs or checkpoints. True means 1.
        val_check_interval: interval between two validations: a number of training batches (int), a fraction of an epoch
            (float), or a time, as in ``max_time``. The default is one epoch.
        check_val_every_n_epoch: validate every n epochs. With None, ``val_check_interval`` counts batches across
            epochs.
        num_sanity_val_steps: number of validation batches to run before training. -1 runs all batches.
        log_every_n_steps: number of optimizer steps between two rows of the log.
        reload_dataloaders_every_n_epochs: call ``train_dataloader`` and ``val_dataloader`` again after this number of
            epochs. With 0, the loaders are created once per fit.
        callbacks: one callback or a list of callbacks.
        logger: loggers, or names of loggers. True writes ``metrics.jsonl`` and ``metrics.csv``; False writes no logs.
        enable_checkpointing: add a ModelCheckpoint callback if the callbacks contain none.
        enable_progress_bar: add a ProgressBar callback if the callbacks contain none.
        enable_model_summary: add a ModelSummary callback if the callbacks contain none.
        enable_plan_table: print the Plan. None prints it unless ``enable_progress_bar=enable_model_summary=False``.
        deterministic: use deterministic algorithms. ``"warn"`` warns about operations that have no such algorithm.
        benchmark: value of ``torch.backends.cudnn.benchmark``. None leaves it unchanged.
        detect_anomaly: raise an error that names the forward operation that caused a NaN gradient. Slows training.
        inference_mode: run evaluations in ``torch.inference_mode``. If False, use ``torch.no_grad``.
        profiler: ``"simple"`` (actions), ``"advanced"`` (functions), ``"pytorch"`` (operations), or a profiler object.
        hang_timeout: time, as in ``max_time``, after which the run ends if ranks wait for a rank that hangs in a step.
            None disables the check.
        default_root_dir: parent folder of the run folders ``version_N``, or an address such as ``"s3://bucket/runs"``.
            The default is ``"runs"``, or the folder of the run in a worker of Ray Train.
        upload_errors: action if a checkpoint cannot be uploaded to an address: ``"warn"`` prints a notice and retries
            after the next checkpoint, and ``"raise"`` ends the fit. If the last checkpoint cannot be uploaded, the fit
            always raises an error.

    Raises:
        RoomierError: an argument is unknown or invalid, or arguments are incompatible with each other.
    """

    @explain_unknown_keywords("Trainer", FORMER_KEYWORDS, harmless=HARMLESS_KEYWORDS, translate=of_roomier)
    def __init__(
        self,
        *,
        plan: Plan | dict[str, Any] | str | Path | None = None,
        strategy: dict[str, Any] | str | None = None,
        accelerator: str = "auto",
        devices: int | str = "auto",
        num_nodes: int | str = "auto",
        precision: str | int | None = "32-true",
        matmul_precision: str = "highest",
        optimizer: OptimizerArgument = None,
        learning_rate: float | None = None,
        lr_schedule: dict[str, Any] | str | None = None,
        step_in_backward: bool | str = False,
        activation_checkpointing: bool | float | dict[str, Any] | str | None = None,
        offload: bool | dict[str, Any] | str | None = None,
        chunked_loss: bool | int = False,
        attention: str = "auto",
        lora: int | dict[str, Any] | None = None,
        compile: bool | dict[str, Any] = False,
        memory_budget: int | str | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        seeding: str | None = None,
        auto_lr_find: bool | str = False,
        auto_scale_batch_size: bool | str = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | timedelta | dict[str, int] | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        fast_dev_run: int | bool = False,
        val_check_interval: int | float | str | timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = 2,
        log_every_n_steps: int | None = 50,
        reload_dataloaders_every_n_epochs: int = 0,
        callbacks: Sequence[Callback | LightningCallback] | Callback | LightningCallback | None = None,
        logger: bool | str | Logger | LightningLogger | Sequence[str | Logger | LightningLogger] | None = True,
        enable_checkpointing: bool | None = True,
        enable_progress_bar: bool | None = True,
        enable_model_summary: bool | None = True,
        enable_plan_table: bool | None = None,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        inference_mode: bool = True,
        profiler: Any = None,
        hang_timeout: str | timedelta | dict[str, int] | None = DEFAULT_HANG_TIMEOUT,
        default_root_dir: str | Path | None = None,
        upload_errors: str = "warn",
    ) -> None:
        given = with_defaults(locals(), Trainer.__init__)
        for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
            check_flag(name, given[name])
        check_flags(given["auto_lr_find"], given["auto_scale_batch_size"])
        launch = present_launch()
        resized: Resized | None = None
        try:
            plan = plan_of(given, Trainer.__init__, launch)
        except PlanError as error:
            plan, resized = resized_plan(error, given, Trainer.__init__, launch)
        super().__init__(given, plan, place(plan.parallel.devices, plan.parallel.num_nodes, launch))
        self.resized = resized
        self.is_in_notebook = launch is None and self.world.size > 1 and is_interactive()

    # Methods for users ---------------------------------------------------------------------------------------------

    def fit(
        self,
        model: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        weights: str | Path | None = None,
        **unknown: Never,
    ) -> None:
        """Train ``model``.

        Args:
            model: a :class:`roomier.Module`, or any ``nn.Module`` whose ``forward`` returns a loss.
            train_dataloaders: a DataLoader, a list of batches, an iterable of batches, or a DataModule.
            val_dataloaders: one loader or a list of loaders, of the same types as ``train_dataloaders``.
            datamodule: a DataModule that provides the data in place of loaders.
            ckpt_path: checkpoint from which the run resumes with bit-identical results. ``"last"`` is the newest
                checkpoint in ``default_root_dir``. A ``.ckpt`` file of Lightning is also accepted.
            weights_only: must be None or True, because loading a checkpoint never executes code.
            weights: initial weights, from a ``.safetensors`` file, a folder that contains ``model.safetensors`` or its
                index, or a checkpoint. Each rank reads only its shard. Ignored if ``ckpt_path`` is found.

        Raises:
            RoomierError: the model or the data is not supported.
            SystemExit: a signal (SIGTERM or Ctrl-C) ended the run at a save point.
        """
        refuse_keywords(Trainer.fit, unknown, FORMER_ARGUMENTS)
        check_weights_only(weights_only)
        if is_one(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        if self.is_in_notebook:
            given = {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "weights": weights}
            call_in_notebook(self, "fit", dict(given, model=model, datamodule=datamodule, ckpt_path=ckpt_path))
            return
        curve = run = None
        if self.auto_lr_find or self.auto_scale_batch_size:
            curve = tune(self, Subject.of(model, train_dataloaders, datamodule, weights), ckpt_path)
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        request = request_of(self, "fit", model, loaders, datamodule, ckpt_path, weights)
        while True:
            try:
                with session(self, request) as run:
                    if curve is not None:
                        write_picture(curve, run)
                    start_fit(run)
                    fit(run)
                    end_fit(run)
                    report_end(self, run)
                return
            except Exception as error:
                run = None  # frees the optimizer states before the fit is opened again
                if (following := continued(self, request, error)) is None:
                    raise
                request = following

    def validate(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` on the validation data.

        Args:
            model: the model. None uses the model of the last fit.
            dataloaders: one loader or a list of loaders. None uses the loaders of the DataModule or of the model.
            ckpt_path: checkpoint whose weights are loaded first: a path, ``"best"`` or ``"last"``. With None, a
                ``model`` argument retains its weights, and the model of the last fit loads the weights of its best
                checkpoint, as in Lightning.
            verbose: True to print the metrics to standard error on rank 0.
            datamodule: a DataModule that provides the data in place of loaders.
            weights_only: must be None or True, because loading a checkpoint never executes code.

        Returns:
            The logged metrics, as one dict for each loader.

        Raises:
            RoomierError: the model, the data or the checkpoint cannot be used.
        """
        return self._evaluate(
            "validate", "validation", model, dataloaders, ckpt_path, datamodule, verbose, weights_only, unknown
        )

    def test(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        **unknown: Never,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` on the test data. Arguments and return value are the same as in :meth:`validate`."""
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, datamodule, verbose, weights_only, unknown)

    def predict(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        **unknown: Never,
    ) -> list[Any] | None:
        """Run ``predict_step`` on the prediction data, and return the collected predictions.

        :meth:`predict_stream` yields the predictions one at a time instead of collecting them.

        Args:
            model: as in :meth:`validate`.
            dataloaders: as in :meth:`validate`.
            datamodule: as in :meth:`validate`.
            return_predictions: False discards the predictions. A callback can write the predictions in
                ``on_predict_batch_end``. None means True.
            ckpt_path: as in :meth:`validate`.
            weights_only: as in :meth:`validate`.

        Returns:
            One item per batch; with several loaders, one list per loader. Every rank receives the predictions of all
            ranks in host memory, in the order of the batches. None if no batches exist or predictions are discarded.
        """
        refuse_keywords(Trainer.predict, unknown, FORMER_ARGUMENTS)
        check_weights_only(weights_only)
        if self.is_in_notebook:
            data = {"dataloaders": dataloaders, "datamodule": datamodule, "return_predictions": return_predictions}
            predicted: list[Any] | None = call_in_notebook(
                self, "predict", dict(data, model=model, ckpt_path=ckpt_path)
            )
            return predicted
        is_returned = return_predictions is not False
        self.predict_loop = PredictLoop(is_returned)
        with self._evaluation("predict", model, dataloaders, ckpt_path, datamodule) as run:
            sources, limits, outputs = run.batches.evaluated, run.batches.limits, self.predict_loop.returned
            if sources:
                evaluate(run, "predict", sources, limits, keeps_predictions=is_returned, kept=outputs)
        if not (is_returned and outputs):
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    def predict_stream(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> Generator[Any, None, None]:
        """Return an iterator that computes each prediction when the prediction is requested.

        The iterator yields one item per batch, for one loader after the other, and stores the predictions of only one
        batch per rank. The run ends when the iterator is exhausted, is closed with ``stream.close()``, or is deleted.
        Until the run ends, this Trainer cannot start another run. Every rank receives the predictions of all ranks in
        host memory, in the order of the batches. Every rank must request the same number of predictions.

        Args:
            model: as in :meth:`validate`.
            dataloaders: as in :meth:`validate`.
            datamodule: as in :meth:`validate`.
            ckpt_path: as in :meth:`validate`.

        Raises:
            RoomierError: the model, the data or the checkpoint cannot be used. The iterator raises a RoomierError if
                another rank stops requesting predictions.
            SystemExit: a signal ended the run. The iterator raises this exception.
        """
        if self.is_in_notebook:
            raise RoomierError("devices", self.world.size, _COMPLETE, "Use predict, or predict_stream with devices=1")
        self.predict_loop = PredictLoop()
        stream = opened_stream(self._evaluation("predict", model, dataloaders, ckpt_path, datamodule))
        next(stream)
        return stream

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
        """Save the state of the last fit in ``filepath``. Every rank must call this method.

        If a hook of a running fit calls this method, the checkpoint is written at the end of the step. A fit that
        resumes from this checkpoint is bit-identical to an uninterrupted fit.

        Args:
            filepath: the folder or the file to create. An empty file and an existing checkpoint are replaced.
            weights_only: True to save only the weights and the hyperparameters, which is not enough to resume a run.
            storage_options: must be None, because a checkpoint is a folder in the file system.
            asynchronous: during a fit, copy the state to host memory, and write the checkpoint while training
                continues. The next save, the handling of a signal, and the end of the fit wait until the checkpoint is
                written. If writing the checkpoint fails, the fit raises the error at its next save point.
            when_committed: function without arguments that is called in this thread when the checkpoint is complete.
            format: ``"folder"``, or ``"lightning"`` for one file that ``torch.load`` reads. The default is the
                ``format`` of ModelCheckpoint, or ``"lightning"`` if ``filepath`` is an existing file.

        Raises:
            CheckpointError: this checkpoint, or the previous asynchronous checkpoint, could not be written, or
                ``filepath`` exists and is not a checkpoint.
            RoomierError: this Trainer has not fitted a model, or ``format`` or ``storage_options`` is invalid.
        """
        if self.is_in_notebook:
            action = "Use the callback ModelCheckpoint(save_last=True)"
            raise RoomierError("save_checkpoint", str(filepath), "the ranks of the notebook have ended", action)
        if self.fitted is None:
            raise RoomierError(
                "save_checkpoint", str(filepath), "this Trainer has not fitted a model", "Call fit first"
            )
        if storage_options is not None:
            action = "Omit storage_options, and copy the folder in when_committed"
            problem = "is not supported, because a checkpoint is a folder in the file system"
            raise RoomierError("storage_options", storage_options, problem, action)
        if format not in (None, "folder", "lightning"):
            raise RoomierError("format", format, "is unknown", "Use 'folder', or 'lightning' for one file")
        if format is None:
            is_file = self.fitted.ranks.on_zero(partial(saves_file, filepath, self.callbacks))
        else:
            is_file = format == "lightning"
        save = save_lightning_file if is_file else save_checkpoint
        save(self.fitted, filepath, bool(weights_only), asynchronous=asynchronous, when_committed=when_committed)

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write ``metrics`` to the loggers as a row for the current step."""
        run_of(self, "log_metrics").log_metrics(dict(metrics))
        self.logged_metrics.update({name: torch.as_tensor(value) for name, value in metrics.items()})

    def log_visual(self, method: str, key: str, value: Any, **options: Any) -> None:
        """Call ``method`` of the loggers at the current step. Call the methods of the module instead."""
        log_visual(run_of(self, method), method, key, value, **options)

    def _evaluate(
        self,
        stage: str,
        step: str,
        model: Any,
        dataloaders: Any,
        ckpt_path: Any,
        datamodule: Any,
        verbose: bool,
        weights_only: bool | None,
        unknown: Mapping[str, object],
    ) -> list[dict[str, float]]:
        refuse_keywords(getattr(Trainer, stage), unknown, FORMER_ARGUMENTS)
        check_weights_only(weights_only)
        if self.is_in_notebook:
            data = {"dataloaders": dataloaders, "datamodule": datamodule, "verbose": verbose}
            found: list[dict[str, float]] = call_in_notebook(self, stage, dict(data, model=model, ckpt_path=ckpt_path))
            return found
        with self._evaluation(stage, model, dataloaders, ckpt_path, datamodule) as run:
            if not run.batches.evaluated:  # the limit on batches is 0
                return []
            evaluate(run, step, run.batches.evaluated, run.batches.limits)
            metrics = {name: float(value) for name, value in run.results.evaluated.items()}
            of_loaders = by_loader(metrics, run.results.loader_of, len(run.batches.evaluated))
        if verbose and self.is_global_zero:
            print(metrics_table(stage, of_loaders), file=sys.stderr, flush=True)
        return of_loaders

    def _evaluation(self, stage: str, model: Any, dataloaders: Any, ckpt_path: Any, datamodule: Any) -> Any:
        if model is None:
            model = self._module
            if model is None:
                raise RoomierError("model", None, f"there is no model to {stage}", "Pass a model, or call fit first")
            best = self.checkpoint_callback
            if ckpt_path is None and best is not None and best.best_model_path:
                ckpt_path = "best"
                notice(f"{stage}: no model was passed, so the weights of {best.best_model_path} are used")
        if is_one(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        if datamodule is None and dataloaders is None:
            datamodule = self.datamodule
        request = request_of(self, stage, model, {LOADER_NAMES[stage]: dataloaders}, datamodule, ckpt_path, None)
        return session(self, request)
