"""One call of fit, validate, test or predict: the ordered steps before and after its loop.

Functions in ``roomier.train`` do the work and return values. This file calls the functions and stores each value on the
Trainer immediately, because user hooks run between the steps and read the Trainer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError

from roomier.api.adapt import seen_by_user
from roomier.api.callback import LOG_METHODS, Callback
from roomier.api.lightning_module import with_methods_of_module
from roomier.api.module import Module
from roomier.api.overrides import check_hook_names, lightning_base
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.uploads import check_storage
from roomier.core.device.capability import capabilities_of
from roomier.core.device.resolve import resolve_device
from roomier.core.log import notice
from roomier.data.workers import workers_outlive_signals
from roomier.launch import exits_together, join
from roomier.launch.job import may_requeue, requeue
from roomier.plan.levers import without_host_tiers
from roomier.run.accumulation import Accumulation
from roomier.run.loaders import RunLoaders
from roomier.run.run import Run
from roomier.run.settled import Fitted, Request, num_steps_of
from roomier.run.signals import REQUEUES, GracefulStop, exit_of
from roomier.run.states import RunningStage, TrainerStatus
from roomier.storage.mirror import local_of
from roomier.train.evaluate import EvaluationCutError
from roomier.train.manual import ManualOptimizer
from roomier.train.opening.notices import num_batches_of_loaders
from roomier.train.opening.open_run import LOADER_NAMES, close_run, make_model, open_run, restore_run
from roomier.train.opening.profiled import process_settings, profiled
from roomier.train.position import watch_for_hangs
from roomier.train.saving.remote import open_uploads
from roomier.train.saving.restore import find_start
from roomier.train.saving.save import is_found_as_last
from roomier.train.settling.checks import check_call
from roomier.train.settling.job import CutTo, checkpoint_after_restart, global_batch_of, remove_empty
from roomier.train.settling.settle import settle
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.keywords.arguments import Resized
from roomier.trainer.report import prepare_forecast


def request_of(
    trainer: TrainerAttributes,
    stage: str,
    model: Any,
    loaders: dict[str, Any],
    datamodule: Any = None,
    ckpt_path: Any = None,
    weights: Any = None,
) -> Request:
    """Return a Request that describes a call of ``trainer``."""
    run, known_fit = trainer.fitted, trainer.known_fit
    plan = trainer.requested_plan if stage == "fit" else trainer.plan
    is_cut = stage == "fit" and (trainer.micro_batch is not None or trainer.num_micro_batches is not None)
    return Request(
        stage=stage,
        module=trainer.module_of(model),
        loaders=loaders,
        datamodule=datamodule,
        ckpt_path=trainer.set_path if ckpt_path is None else ckpt_path,
        weights=weights,
        plan=without_host_tiers(plan, resolve_device(plan.parallel.accelerator).type),
        options=trainer.options,
        world=trainer.world,
        root=at_home(trainer.default_root_dir),
        keeps_files=trainer.keeps_files,
        keeps_checkpoints=trainer.enable_checkpointing,
        trainer=trainer,
        state=trainer.state,
        fitted=known_fit if run is None else Fitted(run.module, run.progress, run.folder, trainer.choice),
        cut=CutTo(trainer.micro_batch, trainer.num_micro_batches) if is_cut else None,
    )


@contextmanager
def session(trainer: TrainerAttributes, request: Request, *, adds_callbacks: bool = True) -> Iterator[Run]:
    """Open a run that is ready for its loop, and close the run at the end of the context.

    Args:
        adds_callbacks: True to add the callbacks from ``configure_callbacks`` and a memory forecast.

    Raises:
        SystemExit: SIGTERM or Ctrl-C ended the run at a save point, or user code raised KeyboardInterrupt. The exit
            code is 128 + the number of the signal.
    """
    module = request.module
    check_call(request)
    parallel = request.plan.parallel
    trainer.ranks = ranks = join(trainer.world, resolve_device(parallel.accelerator).type)
    if not ranks.is_alone:
        trainer.ranks = ranks.arranged(parallel.mesh_on(ranks.world))
    for part in module.modules():  # a Module inside another Module also logs values
        if isinstance(part, Module):
            part.__dict__["_trainer"] = trainer
    trainer.begin_call(request)
    stage = RunningStage("train" if request.is_fit else request.stage)
    with request.state.within(stage), _opened_and_closed(trainer, request, adds_callbacks) as run:
        yield run


@contextmanager
def _opened_and_closed(trainer: TrainerAttributes, request: Request, adds_callbacks: bool) -> Iterator[Run]:
    status, module = "failed", request.module
    run: Run | None = None
    stop = GracefulStop(trainer.ranks.is_alone, polls=trainer.world.local_rank == 0)
    pins = capabilities_of(resolve_device(request.plan.parallel.accelerator)).copies_asynchronously
    data = RunLoaders(module, request.loaders, request.datamodule, request.options, trainer.ranks, pins=pins)
    try:
        with ExitStack() as stack:
            if any(lightning_base(type(part), Module) is not None for part in module.modules()):
                stack.enter_context(with_methods_of_module(module, trainer))
            where, name_of = partial(_at_step, trainer, request), lambda rank: trainer.ranks.mesh.describe(rank)
            stack.enter_context(exits_together(trainer.ranks, where, name_of))
            stack.enter_context(stop)
            stack.enter_context(workers_outlive_signals())
            stack.enter_context(watch_for_hangs(request, trainer.ranks))
            stack.enter_context(process_settings(request.plan, request.options))
            run = _open(trainer, request, data, adds_callbacks, stop)
            _show(trainer, run)
            path = restore_run(run)
            trainer.read_path = None if path is None else str(path)
            stack.enter_context(profiled(run))
            yield run
        status = "success" if stop.received is None else "interrupted"
    except EvaluationCutError:
        status = "interrupted"
        assert stop.received is not None
        notice(f"stopped by {stop.received.name} during an evaluation; its metrics so far are dropped")
    except BaseException as error:
        for callback in trainer.callbacks:  # the hook table does not exist if the setup fails
            callback.on_exception(trainer, seen_by_user(module), error)
        if request.datamodule is not None:
            request.datamodule.on_exception(error)
        if isinstance(error, OutOfMemoryError) and request.is_fit:
            raise _explained(error, trainer, request, run) from error
        if isinstance(error, KeyboardInterrupt):
            status = "interrupted"
            if stop.noted is None:  # raised by user code; Ctrl-C ends a run at its save point
                notice(
                    f"stopped by a KeyboardInterrupt {_at_step(trainer, request)}, without a checkpoint of this step"
                )
                raise SystemExit(128 + signal.SIGINT) from error
        raise
    finally:
        trainer.was_interrupted = status != "success"
        if status == "failed" and trainer.is_global_zero:
            remove_empty(Path(trainer.log_dir))
        if run is not None:
            close_run(run, status)
        try:
            data.end()
            _teardown(trainer, request)
        finally:
            request.state.status = TrainerStatus.FINISHED if status == "success" else TrainerStatus.INTERRUPTED
            if run is not None and run.uploads is not None:
                uploads, run.uploads = run.uploads, None
                uploads.end(is_complete=status != "failed")
    if number := _signal_of_all(trainer, run, int(stop.noted or stop.received or 0)):
        raise exit_of(number)


def _signal_of_all(trainer: TrainerAttributes, run: Run | None, number: int) -> int:
    """Return the number of the signal that ends this process, or 0. After a signal that ends a fit in a SLURM job, also
    return the job to the queue."""
    if run is None or not run.settled.request.is_fit or not may_requeue(os.environ):
        return number
    number = max(trainer.ranks.gather(number))  # at the end of a fit, only some ranks may have received the signal
    # a restart that repeats the same batches would also reach the time limit
    has_progress = run.progress.num_batches > run.now.num_batches_before
    if number in (signal.SIGTERM, REQUEUES) and has_progress and is_found_as_last(run):
        trainer.ranks.on_zero(partial(requeue, os.environ))
    return number


def _at_step(trainer: TrainerAttributes, request: Request) -> str:
    return f"at step {trainer.global_step} of {request.stage}"


def _open(
    trainer: TrainerAttributes, request: Request, data: RunLoaders, adds_callbacks: bool, stop: GracefulStop
) -> Run:
    """Settle the call and open its run. Store each value on the Trainer immediately after it is determined."""
    module, ranks = request.module, trainer.ranks
    best = trainer.checkpoint_callback
    loggers = [*trainer.loggers, *trainer.file_loggers]
    if request.is_fit and request.keeps_files:
        check_storage({"default_root_dir": local_of(request.root)}, ranks)
    start, job = find_start(request, ranks, loggers, None if best is None else best.best_model_path)
    trainer.log_dir = str(start.folder or local_of(request.root))
    if trainer.resized is not None:
        _check_resized(trainer, request, trainer.resized, is_restarted=start.batch is not None)
    trainer.read_path = None if start.checkpoint is None else str(start.checkpoint)
    trainer.show_loaders(data)
    if request.is_fit and not request.is_planned:  # otherwise, the planner may still change the loaders
        estimate = partial(num_steps_of, Accumulation.of(request.plan, trainer.callbacks), request.options, data)
        trainer.estimate_steps, trainer.count_training_batches = estimate, data.count_training_batches
    _setup(trainer, request, adds_callbacks)
    uploads = open_uploads(request, start, ranks, trainer.callbacks)
    settled = settle(request, data, ranks, start=start, callbacks=trainer.callbacks)
    trainer.plan, trainer.ranks = settled.plan, settled.ranks
    if request.is_fit:
        trainer.choice = settled.choice
        if settled.choice is not None:
            from roomier.planner.report.page import show_in_notebook  # late import: only "auto" needs it

            show_in_notebook()
        trainer.estimate_steps, trainer.count_training_batches = settled.num_steps, data.count_training_batches
    make_model(settled, module)
    if request.is_fit and adds_callbacks:
        prepare_forecast(trainer, module)
        settled = replace(settled, callbacks=trainer.callbacks)
    if job is not None and start.folder is not None:
        ranks.on_zero(partial(job.write, start.folder, global_batch_of(settled.plan, data)))
    run = open_run(settled, module, stop=stop, loggers=loggers, hooked=trainer.hooked_callbacks(request.stage))
    run.uploads = uploads
    return run


def _check_resized(trainer: TrainerAttributes, request: Request, resized: Resized, *, is_restarted: bool) -> None:
    """Report the sizes that replace the requested ones.

    Raises:
        PlanError: the job was not restarted, so the requested sizes are invalid.
    """
    if not (is_restarted or (not request.is_fit and checkpoint_after_restart(request.root, trainer.ranks))):
        raise resized.error
    if trainer.ranks.is_zero:
        reason = f"{resized.error.field}={resized.error.received} {resized.error.problem}"
        notice(f"this job was restarted on {trainer.ranks.world.size} ranks: {resized.change}, because {reason}")
    trainer.resized = None


def _show(trainer: TrainerAttributes, run: Run) -> None:
    request = run.settled.request
    trainer.run, trainer.plan = run, run.plan
    trainer.manual_optimizers = [ManualOptimizer(optimizer, run) for optimizer in run.engine.optimizers]
    name = "val" if request.is_fit else LOADER_NAMES[request.stage]
    trainer.num_batches_of[request.stage] = num_batches_of_loaders(run.batches, request.options.limit_of(name))
    if request.is_fit:
        trainer.fitted = run


def _setup(trainer: TrainerAttributes, request: Request, adds_callbacks: bool) -> None:
    module, datamodule = request.module, request.datamodule
    if adds_callbacks:
        trainer.add_callbacks_of(module)
    for callback in trainer.callbacks:
        check_hook_names(callback, Callback)
    if datamodule is not None:
        datamodule.trainer = trainer
    for owner in (datamodule, seen_by_user(module)):
        if owner is not None and prepares(trainer, owner):
            owner.prepare_data()
    trainer.ranks.barrier()  # setup reads the prepared files
    if datamodule is not None:
        datamodule.setup(request.stage)
    for callback in trainer.callbacks:
        callback.setup(trainer, seen_by_user(module), request.stage)
    module.setup(request.stage)


def prepares(trainer: Any, owner: Any) -> bool:
    """Return True if this rank calls ``prepare_data``. One rank per machine, or one rank in total, calls it."""
    rank = trainer.local_rank if owner.prepare_data_per_node else trainer.global_rank
    return bool(rank == 0)


def _teardown(trainer: TrainerAttributes, request: Request) -> None:
    """Call the teardown hooks. If a hook raises an error, the others are called as well."""
    with ExitStack() as stack:  # calls its last function first
        stack.callback(request.module.teardown, request.stage)
        for callback in reversed(trainer.callbacks):
            stack.callback(_teardown_callback, callback, trainer, request)
        if request.datamodule is not None:
            stack.callback(request.datamodule.teardown, request.stage)


def _teardown_callback(callback: Callback, trainer: TrainerAttributes, request: Request) -> None:
    try:
        callback.teardown(trainer, seen_by_user(request.module), request.stage)
    finally:
        for name in LOG_METHODS:
            vars(callback).pop(name, None)


def _explained(
    error: OutOfMemoryError, trainer: TrainerAttributes, request: Request, run: Run | None
) -> OutOfMemoryError:
    # late import: most runs need no planner
    from roomier.planner.measured.out_of_memory import FailedRun, explain_out_of_memory

    failed = FailedRun(
        plan=trainer.plan if run is None else run.plan,
        world=request.world,
        callbacks=trainer.callbacks,
        shapes=trainer.shapes,
        choice=trainer.choice,
        engine=None if run is None else run.engine,
        module=request.module,
        batch=None if run is None else run.results.batch,
        step=None if run is None else run.progress.global_step,
    )
    return explain_out_of_memory(error, failed)
