"""What comes before a loop and after it: data, hooks, engine, run folder, loggers, restore; and the way out."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import OutOfMemoryError, nn

from roomier.adapters.found import name_adapters
from roomier.api.adapt import as_module, seen_by_user
from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.engine import StepHooks
from roomier.api.forward import ForwardModule
from roomier.api.hooks import HookTable
from roomier.api.lightning import LightningAdapter, lent_to_lightning, logged_hparams_of
from roomier.api.misspelled import check_hook_names
from roomier.api.module import Module
from roomier.api.overrides import lightning_base, overrides
from roomier.api.wrapped import network_of
from roomier.core.batch_norms import BATCH_NORMS
from roomier.core.device import resolve_device
from roomier.core.errors import DataError, RoomierError
from roomier.core.log import notice
from roomier.core.rng import separate_rng
from roomier.data.batch_feeds import length_of
from roomier.data.combined import CombinedLoader
from roomier.data.workers import workers_outlive_signals
from roomier.engine.build import build, configure
from roomier.engine.eager import EagerEngine
from roomier.engine.materialise import built_in_parts
from roomier.launch import join
from roomier.loggers.group import LoggerGroup, tell_folder
from roomier.optim.configured import Configured
from roomier.planner.out_of_memory import explain_out_of_memory
from roomier.run.global_batch import GlobalBatch
from roomier.run.loaders import RunLoaders, estimate_steps
from roomier.run.logged.results import Results
from roomier.run.options import DEFAULT_MAX_EPOCHS
from roomier.run.progress import Progress
from roomier.run.run import Run, call
from roomier.run.schedulers import Schedulers
from roomier.run.signals import GracefulStop
from roomier.run.states import TrainerStatus
from roomier.train.evaluate import EvaluationCutError, sanity_check
from roomier.train.manual import ManualOptimizer
from roomier.train.opening.run_folder import is_run_folder, run_folder, write_plan
from roomier.train.opening.settings import process_settings, profiled
from roomier.train.saving.first_weights import first_weights
from roomier.train.saving.restore import resolve_checkpoint, restore, restore_weights
from roomier.train.saving.save import end_background_save
from roomier.train.settling.checks import check_call, check_modes
from roomier.train.settling.job import global_batch_of, job_of_fit, keep_global_batch
from roomier.train.settling.settle import is_planned, naming_nearest, settle_plan
from roomier.train.step import TRANSFER_HOOKS

if TYPE_CHECKING:
    from roomier.trainer import Trainer

LOADER_NAMES = {"validate": "val", "test": "test", "predict": "predict"}
FLAGS = {"fit": "training", "validate": "validating", "test": "testing", "predict": "predicting"}


@contextmanager
def session(
    trainer: Trainer,
    stage: str,
    model: nn.Module,
    loaders: dict[str, Any],
    datamodule: DataModule | None,
    ckpt_path: str | Path | None,
    weights: str | Path | None = None,
) -> Iterator[Run]:
    """A run of ``stage``, ready for its loop.

    Args:
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        loaders: what the user passed, by ``"train"``, ``"val"``, ``"test"``, ``"predict"``.
        weights: what the model begins with, see :func:`roomier.train.saving.first_weights.first_weights`.

    Raises:
        SystemExit: SIGTERM or Ctrl-C ended the run at a save point (128 + the number of the signal).
    """
    module = as_module(model)
    check_call(trainer, stage, module, loaders, datamodule)
    trainer.ranks = join(trainer.world, resolve_device(trainer.plan.parallel.accelerator).type)
    for part in module.modules():  # a Module inside another logs as well
        if isinstance(part, Module):
            part.__dict__["_trainer"] = trainer
    trainer.attach(stage, module, datamodule)
    with (
        trainer.in_stage(FLAGS[stage]),
        _opened_and_closed(trainer, stage, module, loaders, datamodule, ckpt_path, weights) as run,
    ):
        yield run


@contextmanager
def _opened_and_closed(
    trainer: Trainer,
    stage: str,
    module: Module,
    loaders: dict[str, Any],
    datamodule: DataModule | None,
    ckpt_path: str | Path | None,
    weights: str | Path | None,
) -> Iterator[Run]:
    status = "failed"
    run: Run | None = None
    try:
        with ExitStack() as stack:
            if any(lightning_base(type(part), Module) is not None for part in module.modules()):
                stack.enter_context(lent_to_lightning(module, trainer))
            stop = stack.enter_context(GracefulStop(trainer.ranks.is_alone))
            stack.enter_context(workers_outlive_signals())
            stack.enter_context(process_settings(trainer.plan, trainer.options))
            run = _open(trainer, stage, module, loaders, ckpt_path, weights, stop)
            run.profiler = stack.enter_context(profiled(trainer.options.profiler, run.folder))
            yield run
        status = "success" if stop.received is None else "interrupted"
    except EvaluationCutError:
        status = "interrupted"
        assert stop.received is not None
        notice(f"stopped by {stop.received.name} during an evaluation; what it measured so far is dropped")
    except BaseException as error:
        for callback in trainer.callbacks:  # not from the hook table: there is none yet when the setup fails
            callback.on_exception(trainer, seen_by_user(module), error)
        if datamodule is not None:
            datamodule.on_exception(error)
        if isinstance(error, OutOfMemoryError) and stage == "fit":
            raise explain_out_of_memory(error, trainer, run) from error
        raise
    finally:
        trainer.interrupted = status == "interrupted"
        if status == "failed" and trainer.is_global_zero and is_run_folder(Path(trainer.log_dir)):
            with suppress(OSError):  # it failed before anything was written
                Path(trainer.log_dir).rmdir()
        if run is not None:
            run.results.stage = None
            end_background_save(run)
            run.engine.close()
            run.engine.hooks = StepHooks()  # they hold the run, which holds the engine and its optimizer states
            for source in (*([run.train_source] if run.train_source else []), *run.val_sources):
                source.close()
            run.loggers.finalize(status)
        try:
            trainer.teardown(stage)
        finally:
            trainer.status = TrainerStatus.FINISHED if status == "success" else TrainerStatus.INTERRUPTED
    if stop.noted is not None or stop.received is not None:
        raise SystemExit(128 + (stop.noted or stop.received or 0))


def start_fit(run: Run) -> None:
    """What comes between the setup and the first step: the hooks, the plan in print, the sanity check."""
    trainer = run.trainer
    if trainer.is_global_zero:
        print(run.plan.table({"device": str(run.engine.device)}), file=sys.stderr, flush=True)
    _tell_evaluation_mode(run.module)
    if run.plan.batch.accumulate_grad_batches > 1:
        _tell_batch_statistics(run.module, "accumulated gradients")
    elif not run.ranks.is_alone:
        _tell_batch_statistics(run.module, "gradients added up over ranks")
    _tell_transfer_hooks(run.module, trainer.datamodule)
    call(run.hooks.on_fit_start)
    num_batches = run.options.num_sanity_val_steps
    is_fresh = run.progress.global_step == 0 and not run.options.num_dev_batches
    if run.val_sources and num_batches and is_fresh:
        sanity_check(run, math.inf if num_batches == -1 else num_batches)
    if run.random_state is None:  # up to here ranks that were seeded alike draw alike: they made one model
        separate_rng(run.ranks.world.rank)


def _tell_evaluation_mode(module: Module) -> None:
    # Models from the Hugging Face hub come like that; parts frozen on purpose do too, so they are left as they are.
    network = network_of(module)
    names = [name or type(network).__name__ for name, each in network.named_modules() if not each.training]
    if names:
        notice(
            f"{len(names)} modules are in evaluation mode and stay in it, without dropout (the first: {names[0]}); "
            "call model.train() before fit if that is not meant"
        )


def _tell_batch_statistics(module: Module, gradients: str) -> None:
    # Weights of the losses make up for the cut of a batch; nothing does for statistics taken within each part of it.
    found = [
        name or type(each).__name__
        for name, each in network_of(module).named_modules()
        if isinstance(each, BATCH_NORMS) and each.training
    ]
    if found:
        notice(
            f"{gradients} are not those of the whole batch: {len(found)} BatchNorm modules (the first: "
            f"{found[0]}) use the statistics of each micro-batch; GroupNorm, LayerNorm, or BatchNorm in evaluation "
            "mode do not"
        )


def _tell_transfer_hooks(module: Module, datamodule: DataModule | None) -> None:
    if datamodule is None:
        return
    for name in TRANSFER_HOOKS:
        if overrides(module, name, Module) and overrides(datamodule, name, DataModule):
            notice(
                f"{type(module).__name__} and {type(datamodule).__name__} both define {name}: that of the DataModule "
                "is used, as in Lightning"
            )


def end_fit(run: Run) -> None:
    """The hooks after a fit that came to its end."""
    if run.is_interrupted:
        return
    if run.stop.received is not None:
        notice(f"{run.stop.received.name} came when training had ended: the run is complete")
    call(run.hooks.on_fit_end)


def _open(
    trainer: Trainer,
    stage: str,
    module: Module,
    loaders: dict[str, Any],
    ckpt_path: str | Path | None,
    weights: str | Path | None,
    stop: GracefulStop,
) -> Run:
    options, ranks = trainer.options, trainer.ranks
    root = Path(trainer.default_root_dir)
    path = _checkpoint_to_read(trainer, ckpt_path, root)
    is_fit = stage == "fit"
    fitted = trainer.fitted
    job = job_of_fit(root, ranks) if is_fit and trainer.keeps_files else None
    earlier = None if job is None else ranks.on_zero(lambda: job.find_earlier(root))
    if earlier is not None:
        path = earlier.checkpoint
    folder = _folder(trainer, is_fit, root, path)
    first = first_weights(weights, path, trainer.plan, ranks)
    data = RunLoaders(trainer, module, loaders)
    estimate = partial(estimate_steps, trainer, data)
    if is_fit and not is_planned(trainer):  # else the number is known with the plan, and asking would settle it
        trainer.estimate_steps, trainer.count_training_batches = estimate, data.count_training_batches
    _setup(trainer, stage, module)
    if is_fit:
        trainer.estimate_steps, trainer.count_training_batches = estimate, data.count_training_batches
    batch = None if earlier is None else earlier.batch
    _make_model(trainer, stage, module, data, batch, has_weights=first.file is not None)
    if job is not None and folder is not None:
        whole = global_batch_of(trainer, data)
        ranks.on_zero(lambda: job.write(folder, whole))
    plan = trainer.plan

    def optimizers() -> Configured:
        return configure(plan, module, trainer.estimate_steps) if is_fit else Configured()

    with naming_nearest(plan, module):
        engine, configured = build(plan, module, optimizers, EagerEngine, ranks, first.file)
    with _closed_on_error(engine):
        check_modes(trainer, module, configured, is_fit)
        run = Run(
            trainer=trainer,
            module=module,
            plan=name_adapters(plan, network_of(module)),
            options=options,
            engine=engine,
            hooks=HookTable(trainer, module, trainer.hooked_callbacks(stage)),
            schedulers=Schedulers(module, configured.schedulers),
            results=Results(ranks, allows_overlaps=isinstance(module, LightningAdapter)),
            loggers=LoggerGroup(trainer.loggers if folder is not None and ranks.is_zero else ()),
            stop=stop,
            folder=folder,
            ranks=ranks,
            progress=Progress() if is_fit or fitted is None else fitted.progress,
        )
        trainer.run = run
        trainer.manual_optimizers = [ManualOptimizer(optimizer, run) for optimizer in engine.optimizers]
        first.restore(run)
        if is_fit:
            trainer.fitted = run
            _open_fit(run, data, path)
        else:
            _open_evaluation(run, data, stage, path)
    return run


@contextmanager
def _closed_on_error(engine: EagerEngine) -> Iterator[None]:
    """A model that is not run after all is left as it was, without what the engine put into its forward."""
    try:
        yield
    except BaseException:
        engine.close()
        raise


def _checkpoint_to_read(trainer: Trainer, ckpt_path: str | Path | None, root: Path) -> Path | None:
    best = trainer.checkpoint_callback
    best_path = None if best is None else best.best_model_path
    asked = trainer.set_path if ckpt_path is None else ckpt_path
    return trainer.ranks.on_zero(lambda: resolve_checkpoint(asked, root, best_path))


def _folder(trainer: Trainer, is_fit: bool, root: Path, path: Path | None) -> Path | None:
    """Where the run writes; the Trainer and its loggers are told."""
    # What is measured after a fit goes on in its log.
    folder = None if trainer.fitted is None else trainer.fitted.folder
    if is_fit:
        folder = trainer.ranks.on_zero(lambda: run_folder(root, path)) if trainer.keeps_files else None
    trainer.log_dir = str(folder or root)
    trainer.read_path = None if path is None else str(path)
    tell_folder(trainer.loggers, folder)
    return folder


def _make_model(
    trainer: Trainer, stage: str, module: Module, data: RunLoaders, earlier: GlobalBatch | None, *, has_weights: bool
) -> None:
    """Settle the plan, and make the model: by then it is known what is cut."""
    settle_plan(trainer, stage, module, data, earlier)
    if stage == "fit":
        trainer.settle_micro_batch(data)
    with built_in_parts(trainer.plan, trainer.ranks, has_weights=has_weights):
        module.configure_model()
    if stage == "fit":
        trainer.prepare_forecast(module)
    if earlier is not None:
        keep_global_batch(trainer, module, data, earlier)


def _open_evaluation(run: Run, data: RunLoaders, stage: str, path: Path | None) -> None:
    name = LOADER_NAMES[stage]
    run.val_sources, run.val_limits = data.evaluation(name)
    run.trainer.num_batches_of[stage] = _num_batches_of_loaders(run, name)
    if not run.val_sources:
        raise DataError(f"{name}_dataloaders", None, f"there is no data to {stage} on", f"Pass {name}_dataloaders")
    if path is not None:
        restore_weights(run, path)
    if run.folder is not None:
        run.loggers.start(run.folder, run.progress.global_step)


def _open_fit(run: Run, data: RunLoaders, path: Path | None) -> None:
    options = run.options
    run.train_source = data.train_source
    run.num_training_batches = data.num_training_batches
    run.epoch_limit, run.step_limit = options.epoch_limit(), options.step_limit()
    run.val_sources, run.val_limits = data.evaluation("val")
    defines_validation = overrides(run.module, "validation_step", Module)
    is_wanted = defines_validation and not isinstance(run.module, ForwardModule) and options.limit_val_batches != 0
    if is_wanted and not run.val_sources:
        notice(f"{type(run.module).__name__} has a validation_step, but there is no data to validate on")
    if run.val_sources and not defines_validation:
        notice(f"{type(run.module).__name__} has no validation_step: val_dataloaders are not used")
        run.val_sources, run.val_limits = (), ()
    run.trainer.num_batches_of["fit"] = _num_batches_of_loaders(run, "val")
    if run.val_sources:
        run.val_interval = options.val_interval(run.num_training_batches)
        _tell_validation_at_unknown_end(run)
    hyperparameters = _hyperparameters_to_log(run.module, run.trainer.datamodule)
    if not (options.is_bounded or options.num_dev_batches):
        notice(f"neither max_epochs, max_steps nor max_time is set: training for {DEFAULT_MAX_EPOCHS} epochs")
    if path is not None:
        restore(run, path)
    if run.folder is not None:
        folder, text = run.folder, run.plan.to_yaml()
        run.ranks.on_zero(lambda: write_plan(folder, text))
        run.loggers.start(run.folder, run.progress.global_step if path is not None else None)
        run.loggers.log_hyperparams(hyperparameters)
    run.results.stage = "train"


def _num_batches_of_loaders(run: Run, name: str) -> list[float]:
    """As Lightning tells them: of loaders whose batches are joined, those of each."""
    limit, told = run.options.limit_of(name), list[float]()
    for source, num_batches in zip(run.val_sources, run.val_limits, strict=True):
        if not isinstance(source.loader, CombinedLoader):
            told.append(num_batches)
            continue
        for length in map(length_of, source.loader.flattened):
            is_share = isinstance(limit, float) and limit < 1.0 and math.isfinite(length)
            told.append(int(length * limit) if is_share else length if isinstance(limit, float) else min(limit, length))
    return told


def _tell_validation_at_unknown_end(run: Run) -> None:
    options = run.options
    limits = {"max_steps": options.max_steps} if options.max_steps != -1 else {"max_time": options.max_time}
    [(limit, value)] = limits.items()
    if math.isinf(run.val_interval) and math.isinf(run.num_training_batches) and value is not None:
        notice(
            "the training loader has no length, so validation runs when it comes to an end, and not at all if "
            f"{limit}={value} comes before; set val_check_interval to a number of batches to validate within an epoch"
        )


def _hyperparameters_to_log(module: Module, datamodule: DataModule | None) -> dict[str, Any]:
    of_module, of_data = module.logged_hparams, {} if datamodule is None else logged_hparams_of(datamodule)
    for name in of_module.keys() & of_data.keys():
        if repr(of_module[name]) != repr(of_data[name]):  # values of any type: not all of them can be compared
            raise RoomierError(
                "hparams",
                {name: (of_module[name], of_data[name])},
                "the module and the DataModule have this hyperparameter with different values",
                f"Rename one, or leave one out: save_hyperparameters(ignore={name!r})",
            )
    return {**of_data, **of_module}


def _prepares(trainer: Trainer, owner: Any) -> bool:
    """Whether this rank calls ``prepare_data``: one of each machine, which has files of its own, or one of all."""
    rank = trainer.local_rank if owner.prepare_data_per_node else trainer.global_rank
    return bool(rank == 0)


def _setup(trainer: Trainer, stage: str, module: Module) -> None:
    trainer.add_callbacks_of(module)
    for callback in trainer.callbacks:
        check_hook_names(callback, Callback)
    datamodule = trainer.datamodule
    if datamodule is not None:
        datamodule.trainer = trainer
    for owner in (datamodule, seen_by_user(module)):
        if owner is not None and _prepares(trainer, owner):
            owner.prepare_data()
    trainer.ranks.barrier()  # setup reads what was prepared
    if datamodule is not None:
        datamodule.setup(stage)
    for callback in trainer.callbacks:
        callback.setup(trainer, seen_by_user(module), stage)
    module.setup(stage)
