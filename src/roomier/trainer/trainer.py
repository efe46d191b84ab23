"""Trainer: keywords -> Plan -> Engine -> fit. No logic of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Never

import torch
from torch import nn

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.lightning_types import LightningCallback, LightningLogger
from roomier.api.logger import Logger
from roomier.api.module import Module
from roomier.api.overrides import is_one
from roomier.core.device import resolve_device
from roomier.core.errors import RoomierError
from roomier.core.keywords import explain_unknown_keywords, refuse_keywords
from roomier.core.log import notice
from roomier.launch import join, place, present_launch
from roomier.loggers.by_name import loggers_from_flag
from roomier.plan import Plan
from roomier.run.options import DEFAULT_HANG_TIMEOUT, LoopOptions, check_flag
from roomier.run.progress import Progress
from roomier.run.run import Run, run_of
from roomier.run.settled import CutBatches
from roomier.train.evaluate import evaluate
from roomier.train.fit import fit
from roomier.train.opening.open_run import LOADER_NAMES, end_fit, start_fit
from roomier.train.predicting.stream import opened_stream
from roomier.train.saving.save import save_checkpoint
from roomier.train.settling.checks import check_callbacks
from roomier.trainer.keywords.arguments import (
    FORMER_ARGUMENTS,
    FORMER_KEYWORDS,
    HARMLESS_KEYWORDS,
    callbacks_of,
    check_weights_only,
    kind_of,
    ordered,
    plan_of,
    with_defaults,
)
from roomier.trainer.keywords.former_flags import refuse_former_flags
from roomier.trainer.last_call import LastCall
from roomier.trainer.lightning.callbacks import adopted
from roomier.trainer.lightning.predicted import KeepsPredicted, writes_at_end, writes_predictions
from roomier.trainer.measured import by_loader, metrics_table
from roomier.trainer.session import request_of, session
from roomier.trainer.trial_copy import copied_for_trial
from roomier.tuner.before_fit import check_flags, tune, write_picture
from roomier.tuner.trial import Subject


class Trainer(LastCall):
    """Trains a module under a Plan. Keywords that Lightning's Trainer has mean the same here.

    Args:
        plan: a Plan, a mapping, or the path of a YAML file; instead of the keywords that make one.
        strategy: how the model is spread over ranks: ``"single"``, ``"ddp"``, ``"zero1"``, ``"zero2"``, ``"zero3"``,
            ``"hsdp"``; ``"auto"``, the fastest plan that fits; or a dict with ``name`` and fields of ``ParallelPlan``.
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"mps"``.
        devices: processes on each node, each with a device of its own; ``"auto"``: what torchrun, SLURM or MPI started,
            else all CUDA devices, or one process without any.
        num_nodes: machines; ``"auto"``: as many as the launcher started.
        precision: ``"32-true"`` (the default: nothing is rounded below fp32), ``"bf16-mixed"``, ``"16-mixed"``,
            ``"bf16-true"``, ``"64-true"``.
        matmul_precision: fp32 matrix products in ``"highest"`` (fp32), ``"high"`` (tf32) or ``"medium"``.
        optimizer: its name, or a dict with ``name`` and its options, for models without ``configure_optimizers``.
        learning_rate: of that optimizer.
        lr_schedule: a name, or a dict with ``name``, ``warmup_steps``, ``min_lr_ratio``.
        step_in_backward: update each parameter as its gradient is complete, and free the gradient.
        activation_checkpointing: what blocks compute again in backward: ``"full"``, ``"selective"``, ``"every_n"``, or
            a budget for the peak, such as ``"6GiB"``.
        offload: what waits in host memory: ``{"activations": "cpu"}``.
        chunked_loss: never hold the logits of a language model whole; True, or the tokens of a chunk.
        attention: the kernel of scaled_dot_product_attention: ``"auto"``, ``"flash"``, ``"efficient"``, ``"math"``.
        lora: the rank of low-rank adapters on a frozen model, or a dict with ``rank``, ``alpha``, ``dropout``,
            ``targets``, ``trained`` (modules that are trained whole), ``base`` (``"int8"``, ``"nf4"``).
        compile: compile each block.
        memory_budget: what a device may hold at the peak of a step, such as ``"22GiB"``; None is all it has.
        accumulate_grad_batches: micro-batches of one optimizer step; their gradient is that of the whole batch.
        gradient_clip_val: the largest norm, or value, of gradients; None clips nothing.
        gradient_clip_algorithm: clip by ``"norm"`` (the default) or ``"value"``.
        auto_lr_find: before a fit, try rising learning rates on a copy of the model, and take the suggested one; or the
            name of the attribute of the module that holds it.
        auto_scale_batch_size: before a fit, try how large micro-batches may be; a step keeps its samples. True is
            ``"power"``; or ``"binsearch"``.
        max_epochs: train at most so many; -1 has no end.
        min_epochs: train at least so many.
        max_steps: at most so many optimizer steps; -1 is no limit.
        min_steps: at least so many optimizer steps.
        max_time: at most so long: ``"DD:HH:MM:SS"``, a ``timedelta``, or a dict of its keywords.
        limit_train_batches: a number of batches (int) or a fraction (float) of an epoch, of each rank.
        limit_val_batches: the same, of all ranks together.
        limit_test_batches: as ``limit_val_batches``.
        limit_predict_batches: as ``limit_val_batches``.
        overfit_batches: train and validate on that many batches, in fixed order.
        fast_dev_run: run that many batches of everything (True: 1), without logs and checkpoints.
        val_check_interval: validate after so many training batches (int) or a fraction of an epoch (float).
        check_val_every_n_epoch: validate in every n-th epoch; None counts ``val_check_interval`` across epochs.
        num_sanity_val_steps: validation batches before training begins; -1 for all.
        log_every_n_steps: a row in the log every so many optimizer steps.
        callbacks: objects.
        logger: objects or names; True writes ``metrics.jsonl``, ``metrics.csv``.
        enable_checkpointing: a ModelCheckpoint is there by default.
        enable_progress_bar: a ProgressBar is there by default.
        enable_model_summary: a ModelSummary is there by default.
        deterministic: True, False or ``"warn"``, as ``torch.use_deterministic_algorithms``.
        benchmark: let cuDNN try kernels.
        detect_anomaly: find the operation that gives NaN (slow).
        inference_mode: evaluate under ``torch.inference_mode`` (else ``no_grad``).
        profiler: ``"torch"`` or a ``torch.profiler.profile``.
        hang_timeout: on several ranks, end the run if the others wait this long for a rank that hangs in a step; all
            ranks print their positions after a minute. In the forms of ``max_time``; None sets no limit.
        default_root_dir: where run folders ``version_N`` go (``"runs"``).

    Raises:
        RoomierError: a keyword is unknown or wrong, or asks for what is not built.
    """

    @explain_unknown_keywords("Trainer", FORMER_KEYWORDS, harmless=HARMLESS_KEYWORDS, check=refuse_former_flags)
    def __init__(
        self,
        *,
        plan: Plan | dict[str, Any] | str | Path | None = None,
        strategy: dict[str, Any] | str = "single",
        accelerator: str = "auto",
        devices: int | str = "auto",
        num_nodes: int | str = "auto",
        precision: str | int | None = "32-true",
        matmul_precision: str = "highest",
        optimizer: dict[str, Any] | str | None = None,
        learning_rate: float | None = None,
        lr_schedule: dict[str, Any] | str | None = None,
        step_in_backward: bool | str = False,
        activation_checkpointing: bool | float | dict[str, Any] | str | None = None,
        offload: bool | dict[str, Any] | str | None = None,
        chunked_loss: bool | int = False,
        attention: str = "auto",
        lora: int | dict[str, Any] | None = None,
        compile: bool = False,
        memory_budget: int | str | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
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
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = 2,
        log_every_n_steps: int | None = 50,
        callbacks: Sequence[Callback | LightningCallback] | Callback | LightningCallback | None = None,
        logger: bool | str | Logger | LightningLogger | Sequence[str | Logger | LightningLogger] | None = True,
        enable_checkpointing: bool | None = True,
        enable_progress_bar: bool | None = True,
        enable_model_summary: bool | None = True,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        inference_mode: bool = True,
        profiler: Any = None,
        hang_timeout: str | timedelta | dict[str, int] | None = DEFAULT_HANG_TIMEOUT,
        default_root_dir: str | Path | None = None,
    ) -> None:
        given = with_defaults(locals(), Trainer.__init__)
        for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
            check_flag(name, given[name])
        check_flags(given["auto_lr_find"], given["auto_scale_batch_size"])
        launch = present_launch()
        plan = plan_of(given, Trainer.__init__, launch)
        options = LoopOptions(**{name: given[name] for name in LoopOptions.__dataclass_fields__})
        is_dev_run = bool(options.num_dev_batches)
        keeps_checkpoints = given["enable_checkpointing"] and not is_dev_run
        super().__init__(
            plan=plan,
            options=options,
            world=place(plan.parallel.devices, plan.parallel.num_nodes, launch),
            callbacks=ordered(callbacks_of(given, keeps_checkpoints)),
            loggers=loggers_from_flag(given["logger"], is_dev_run=is_dev_run),
            logger_is_on=bool(given["logger"]),
            enable_checkpointing=keeps_checkpoints,
            auto_lr_find=given["auto_lr_find"],
            auto_scale_batch_size=given["auto_scale_batch_size"],
        )
        check_callbacks(self.callbacks)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: the settings, the step and the epoch, but no run.

        A copy made within a run has no callbacks and loggers, because they hold open files.
        """
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied.state = replace(self.state)
        if self.is_running:
            copied.callbacks, copied.loggers = [], []
        copied.forget_runs(Progress(**self.run.progress.state()) if self.run else self.copied_progress)
        return vars(copied)

    # What a user calls --------------------------------------------------------------------------------------------

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
            model: a :class:`roomier.Module`, or any ``nn.Module`` whose forward returns a loss.
            train_dataloaders: a list of batches, an iterable of batches, a DataLoader, or a DataModule.
            val_dataloaders: the same, or several of them.
            ckpt_path: a checkpoint to go on from, bit for bit; ``"last"``: the newest under ``default_root_dir``. A
                ``.ckpt`` of Lightning is gone on with as Lightning would.
            weights_only: None or True: loading a checkpoint never executes code.
            weights: what ``model`` begins with: a ``.safetensors`` file, a folder with ``model.safetensors`` or its
                index, or a checkpoint. Each rank reads its part. Not read where ``ckpt_path`` is found.

        Raises:
            RoomierError: what was given cannot be trained; it says what to do.
            SystemExit: SIGTERM or Ctrl-C; the run was saved first.
        """
        refuse_keywords(Trainer.fit, unknown, FORMER_ARGUMENTS)
        check_weights_only(weights_only)
        if is_one(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        curve = None
        if self.auto_lr_find or self.auto_scale_batch_size:
            curve = tune(self, Subject.of(model, train_dataloaders, datamodule, weights), ckpt_path)
        loaders = {"train": train_dataloaders, "val": val_dataloaders}
        request = request_of(self, "fit", model, loaders, datamodule, ckpt_path, weights)
        with session(self, request) as run:
            if curve is not None:
                write_picture(curve, run)
            start_fit(run)
            fit(run)
            end_fit(run)

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
        """One pass over the validation data; the logged metrics, a dict for each loader.

        Args:
            model: by default the one that was fitted.
            ckpt_path: weights to load first: a path, ``"best"`` or ``"last"``. None takes those of ``model``; where no
                model is passed either, the best checkpoint of the fit before, as Lightning does.
        """
        refuse_keywords(Trainer.validate, unknown, FORMER_ARGUMENTS)
        check_weights_only(weights_only)
        return self._evaluate("validate", "validation", model, dataloaders, ckpt_path, datamodule, verbose)

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
        """As :meth:`validate`, with ``test_step`` over the test data."""
        refuse_keywords(Trainer.test, unknown, FORMER_ARGUMENTS)
        check_weights_only(weights_only)
        return self._evaluate("test", "test", model, dataloaders, ckpt_path, datamodule, verbose)

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
        """What ``predict_step`` returned for each batch; a list of such lists with several loaders. On several ranks
        each gets the predictions of all, in the order of the batches, in host memory.

        :meth:`predict_stream` gives one after another and keeps none.

        Args:
            return_predictions: False keeps none of them (a callback takes them in ``on_predict_batch_end``); None is
                True.
        """
        refuse_keywords(Trainer.predict, unknown, FORMER_ARGUMENTS)
        check_weights_only(weights_only)
        is_returned = self.predict_loop.return_predictions = return_predictions is not False
        with self._evaluation("predict", model, dataloaders, ckpt_path, datamodule) as run:
            sources, limits = run.batches.evaluated, run.batches.limits
            outputs = evaluate(run, "predict", sources, limits, keeps_predictions=is_returned)
        if not is_returned:
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    def predict_stream(
        self,
        model: nn.Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> Generator[Any, None, None]:
        """What ``predict_step`` returns, batch for batch and loader after loader, computed when it is asked for: one
        batch (of each rank) is held at a time.

        The run ends when the iterator is exhausted, closed (``stream.close()``), or let go; until then this Trainer
        does nothing else. On several ranks each gets the predictions of all, on the host, in the order of the batches;
        every rank must take as many: where one leaves early, the others get an error that names it.

        Raises:
            RoomierError: what was given cannot be predicted; it says what to do. Raised by the call itself. Where the
                next batch is asked for: another rank has left, or does not ask.
            SystemExit: a signal came; raised where the next batch is asked for.
        """
        self.predict_loop.return_predictions = False
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
    ) -> None:
        """Save the run as the folder ``filepath``. From a hook of a running fit it is written at the end of the step,
        where a resume is exact. On several ranks every rank calls it.

        Args:
            weights_only: leave out what only a resumed run needs.
            storage_options: None: a checkpoint is a folder of the file system.
            asynchronous: within a fit, go on as soon as the state is copied to host memory; it is written and committed
                beside the training. One at a time: the next save waits for it, and so do a signal and the end of the
                fit. If it fails, the fit ends with that error at its next save point.
            when_committed: called, in this thread, once the checkpoint is complete.

        Raises:
            CheckpointError: it could not be written, or the one before it.
            RoomierError: nothing was fitted yet.
        """
        if self.fitted is None:
            raise RoomierError(
                "save_checkpoint", str(filepath), "this Trainer has not fitted anything yet", "Call fit first"
            )
        if storage_options is not None:
            action = "Leave it out, and copy the folder in when_committed"
            raise RoomierError(
                "storage_options", storage_options, "a checkpoint is a folder of the file system", action
            )
        save_checkpoint(
            self.fitted, filepath, bool(weights_only), asynchronous=asynchronous, when_committed=when_committed
        )

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Write a row to the loggers at the current step."""
        run_of(self, "log_metrics").log_metrics(dict(metrics))
        self.logged_metrics.update({name: torch.as_tensor(value) for name, value in metrics.items()})

    # What the session calls ---------------------------------------------------------------------------------------

    def add_callbacks_of(self, module: Module) -> None:
        """Add what ``configure_callbacks`` returns; a callback of the same type here gives way."""
        own = module.configure_callbacks()
        if own is not None and not (isinstance(own, (list, tuple)) or is_one(own, Callback)):
            action = "Return a list of objects of subclasses of roomier.Callback"
            raise RoomierError("configure_callbacks", own, "is not a list of callbacks", action)
        own = adopted([own] if is_one(own, Callback) else list(own or ()))
        types = {kind_of(each) for each in own}
        others = [each for each in adopted(self.callbacks) if kind_of(each) not in types]  # some may be new in the list
        self.callbacks = ordered(others + own)
        check_callbacks(self.callbacks)

    def hooked_callbacks(self, stage: str) -> list[Any]:
        """Those whose hooks ``stage`` calls: before prediction writers comes what they ask."""
        writers = [each for each in self.callbacks if writes_predictions(each)] if stage == "predict" else []
        if not writers:
            return self.callbacks
        return [KeepsPredicted(until_end=any(map(writes_at_end, writers))), *self.callbacks]

    # What the tuner calls -----------------------------------------------------------------------------------------

    def use_next(
        self, *, plan: Plan | None = None, micro_batch: int | None = None, num_micro_batches: int | None = None
    ) -> None:
        """Use values that the tuner found in the next fits.

        Args:
            plan: replaces the requested plan.
            micro_batch: samples of a micro-batch on each rank.
            num_micro_batches: micro-batches per step.
        """
        if plan is not None:
            self.plan = self.asked_plan = plan
        if micro_batch is not None or num_micro_batches is not None:
            self.micro_batch, self.num_micro_batches = micro_batch, num_micro_batches

    def use_learning_rate(self, learning_rate: float | None) -> None:
        """Use ``learning_rate`` for the optimizer that the Trainer names."""
        self.asked_plan, self.plan = (
            replace(plan, optimizer=replace(plan.optimizer, lr=learning_rate)) for plan in (self.asked_plan, self.plan)
        )

    def join_ranks(self) -> None:
        """Join the other ranks."""
        self.ranks = join(self.world, resolve_device(self.plan.parallel.accelerator).type)

    def copy_for_trial(self, plan: Plan, options: LoopOptions, callback: Callback) -> Trainer:
        """Return a Trainer with the same settings that writes nothing and has ``callback`` only."""
        return copied_for_trial(self, plan, options, callback)

    def session_of_trial(
        self,
        model: nn.Module,
        loaders: dict[str, Any],
        datamodule: DataModule | None,
        weights: str | Path | None,
        cut: CutBatches | None,
    ) -> AbstractContextManager[Run]:
        """Open a fit without additional callbacks, forecasts or files."""
        request = replace(request_of(self, "fit", model, loaders, datamodule, None, weights), cut=cut)
        return session(self, request, adds_callbacks=False)

    # ----------------------------------------------------------------------------------------------------------------

    def _evaluate(
        self, stage: str, step: str, model: Any, dataloaders: Any, ckpt_path: Any, datamodule: Any, verbose: bool
    ) -> list[dict[str, float]]:
        with self._evaluation(stage, model, dataloaders, ckpt_path, datamodule) as run:
            evaluate(run, step, run.batches.evaluated, run.batches.limits)
            metrics = {name: float(value) for name, value in run.results.callback_metrics.items()}
            of_loaders = by_loader(metrics, run.results.loader_of, len(run.batches.evaluated))
        if verbose and self.is_global_zero:
            print(metrics_table(stage, of_loaders), file=sys.stderr, flush=True)
        return of_loaders

    def _evaluation(self, stage: str, model: Any, dataloaders: Any, ckpt_path: Any, datamodule: Any) -> Any:
        if model is None:
            model = self._module
            if model is None:
                raise RoomierError("model", None, f"there is nothing to {stage}", "Pass a model, or call fit first")
            best = self.checkpoint_callback
            if ckpt_path is None and best is not None and best.best_model_path:
                ckpt_path = "best"
                notice(f"{stage}: no model was passed, so it takes the weights of {best.best_model_path}")
        if is_one(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        if datamodule is None and dataloaders is None:
            datamodule = self.datamodule
        request = request_of(self, stage, model, {LOADER_NAMES[stage]: dataloaders}, datamodule, ckpt_path, None)
        return session(self, request)
