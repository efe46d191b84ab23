"""Open a run from settled facts, and close it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roomier.api.engine import Engine, StepHooks
from roomier.api.forward import ForwardModule
from roomier.api.hooks import HookTable
from roomier.api.lightning_module import LightningAdapter
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core.device.events import Events
from roomier.core.device.rng import rng_state, separate_rng, set_rng_state
from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.mesh import CONTEXT
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.facts import Facts, facts_of
from roomier.engine.materialise import built_in_parts
from roomier.engine.optimizers import ConfigureOptimizers, configure
from roomier.engine.staged import StagedEngine
from roomier.loggers.group import LoggerGroup, choosing_their_folders
from roomier.plan import Plan
from roomier.run.logged.metric_state import gather_from_data_ranks
from roomier.run.logged.results import Results
from roomier.run.options import DEFAULT_MAX_EPOCHS
from roomier.run.progress import Progress
from roomier.run.run import Batches, Run, call
from roomier.run.schedulers import Schedulers
from roomier.run.settled import Settled
from roomier.run.signals import GracefulStop
from roomier.techniques.adapters.lora import name_adapters
from roomier.techniques.optim.configured import Configured
from roomier.train.evaluate import sanity_check
from roomier.train.opening.notices import (
    hyperparameters_to_log,
    report_batch_statistics,
    report_evaluation_mode,
    report_validation_at_unknown_end,
)
from roomier.train.opening.pipeline import StepTraces, pipeline_of
from roomier.train.opening.region import region_of
from roomier.train.saving.restore import restore, restore_first_weights, restore_last, restore_weights
from roomier.train.saving.save import end_background_save
from roomier.train.settling.checks import check_modes
from roomier.train.settling.job import write_plan

LOADER_NAMES = {"validate": "val", "test": "test", "predict": "predict"}
BuildEngine = Callable[[Plan, Module, ConfigureOptimizers, Settled, Facts], tuple[Engine, Configured]]


def build_eager(
    plan: Plan, module: Module, optimizers: ConfigureOptimizers, settled: Settled, facts: Facts
) -> tuple[Engine, Configured]:
    """Build the engine of a run on real devices."""
    weights = settled.start.weights.file
    if facts.pipeline is None:
        return build(plan, module, optimizers, EagerEngine, settled.ranks, weights, facts)
    engine, configured = build(plan, module, optimizers, StagedEngine, settled.ranks, weights, facts)
    engine.trace_of = StepTraces(module, facts, plan)
    return engine, configured


def make_model(settled: Settled, module: Module) -> None:
    """Call ``configure_model``. If the plan divides the model, each rank allocates memory only for its shard."""
    in_stages = settled.request.is_fit and settled.plan.parallel.pipeline_parallel_size > 1
    has_weights = settled.start.weights.file is not None
    with built_in_parts(settled.plan, settled.ranks, has_weights=has_weights, in_stages=in_stages):
        module.configure_model()


def open_run(
    settled: Settled,
    module: Module,
    *,
    stop: GracefulStop | None = None,
    loggers: Sequence[Any] = (),
    hooked: Sequence[Any] | None = None,
    build: BuildEngine = build_eager,
) -> Run:
    """Build the engine, open the loaders, and return a run whose state is not yet restored.

    Args:
        settled: the facts of the run.
        stop: object that records the signals that end the run.
        loggers: the loggers, which receive the rows of rank 0 if the run writes a run folder.
        hooked: the callbacks whose hooks are called; None means the callbacks of ``settled``.
        build: function that builds the engine.

    Raises:
        RoomierError: the plan cannot be built for this module, or no data is available.
    """
    request, plan, ranks = settled.request, settled.plan, settled.ranks

    def optimizers(blocks: Sequence[nn.Module]) -> Configured:
        return configure(plan, module, settled.num_steps, blocks) if request.is_fit else Configured()

    facts = facts_of(plan, module, ranks)
    if plan.parallel.context_parallel_size > 1:
        facts = replace(facts, region=region_of(settled, module, facts))
    if plan.parallel.pipeline_parallel_size > 1:
        facts = replace(facts, pipeline=pipeline_of(settled, module, facts))
    settled = replace(settled, plan=name_adapters(plan, facts.network, facts.blocks))
    engine, configured = build(plan, module, optimizers, settled, facts)  # installs only the requested techniques
    with ExitStack() as on_failure:
        on_failure.callback(engine.close)  # restores the forward method of the model
        if request.is_fit:
            check_modes(plan, settled.callbacks, module, configured, request.world.size)
        hooks = HookTable(request.trainer, module, settled.callbacks if hooked is None else hooked)
        if not ranks.is_alone:
            gather_from_data_ranks(module, ranks)
        if plan.offload.optimizer_states != "none":
            hooks.complete_updates_before(engine.complete_updates)
        fitted, called = request.fitted, tuple(loggers) if ranks.is_zero else ()
        if settled.start.folder is None:
            called = () if request.is_fit else choosing_their_folders(called)
        run = Run(
            settled=settled,
            engine=engine,
            hooks=hooks,
            schedulers=Schedulers(module, configured.schedulers),
            results=Results(ranks, allows_overlaps=isinstance(module, LightningAdapter)),
            loggers=LoggerGroup(called),
            stop=stop or GracefulStop(),
            batches=batches_of_fit(settled, module) if request.is_fit else _batches_of_evaluation(settled),
            progress=Progress() if request.is_fit or fitted is None else fitted.progress,
            events=_events_of(settled, engine.device) if request.is_fit and plan.batch.seeding == "events" else None,
        )
        on_failure.pop_all()
    return run


def _events_of(settled: Settled, device: torch.device) -> Events:
    ranks = settled.ranks
    seed = ranks.from_zero(torch.initial_seed() % 2**63)
    return Events(seed, device, data_rank=ranks.data.world.rank, coordinate=ranks.mesh.coordinate(CONTEXT))


def _batches_of_evaluation(settled: Settled) -> Batches:
    stage = settled.request.stage
    name = LOADER_NAMES[stage]
    sources, limits = settled.data.evaluation(name)
    if not sources and settled.request.options.limit_of(name) != 0:
        raise DataError(f"{name}_dataloaders", None, f"{stage} requires data", f"Pass {name}_dataloaders")
    return Batches(evaluated=sources, limits=limits)


def batches_of_fit(settled: Settled, module: Module) -> Batches:
    """Return the training and validation data of a fit."""
    options, data = settled.request.options, settled.data
    num_training = data.count_training_batches()
    sources, limits = data.evaluation("val", shuffle_allowed=not options.overfit_batches)
    defines_validation = overrides(module, "validation_step", Module)
    is_wanted = defines_validation and not isinstance(module, ForwardModule) and options.limit_val_batches != 0
    if is_wanted and not sources:
        notice(f"{type(module).__name__} defines validation_step, but no validation data was passed")
    if sources and not defines_validation:
        notice(f"{type(module).__name__} does not define validation_step, so val_dataloaders are not used")
        sources, limits = [], []
    interval = options.val_interval(num_training) if sources else math.inf
    if sources:
        report_validation_at_unknown_end(options, interval, num_training)
    return Batches(data.train_source, num_training, sources, limits, interval)


def restore_run(run: Run) -> Path | None:
    """Load the initial weights and the checkpoint of ``run``, and start its loggers.

    Returns:
        The checkpoint that was loaded; None if no checkpoint was loaded.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not match the model or the optimizer.
    """
    restore_first_weights(run)
    request, start = run.settled.request, run.settled.start
    if not request.is_fit:
        path = _restored(run, restore_weights)
        if start.folder is not None:
            run.loggers.start(start.folder, run.log_step)
        return path
    hyperparameters = hyperparameters_to_log(run.module, request.datamodule)
    if not request.options.is_bounded:
        notice(f"max_epochs, max_steps and max_time are not set: training for {DEFAULT_MAX_EPOCHS} epochs")
    path = _restored(run, restore)
    if start.folder is not None:
        folder, text = start.folder, run.plan.to_yaml()
        run.ranks.on_zero(lambda: write_plan(folder, text))
        run.loggers.start(folder, run.log_step if start.checkpoint is not None else None)
        run.loggers.log_hyperparams(hyperparameters)
    run.results.stage = "train"
    return path


def _restored(run: Run, restore_one: Callable[[Run, Path], None]) -> Path | None:
    path = run.settled.start.checkpoint
    if path is None:
        return None
    if run.settled.start.is_last:
        return restore_last(run, path, restore_one)
    restore_one(run, path)
    return path


def start_fit(run: Run) -> None:
    """Print the plan and notices, call ``on_fit_start`` and run the sanity check."""
    if run.ranks.is_zero and run.options.enable_plan_table is not False:
        print(run.plan.table({"device": str(run.engine.device)}), file=sys.stderr, flush=True)
    report_evaluation_mode(run.module)
    if run.plan.batch.accumulate_grad_batches > 1:
        report_batch_statistics(run.module, "accumulated gradients")
    elif not run.ranks.is_alone:
        report_batch_statistics(run.module, "gradients summed over ranks")
    call(run.hooks.on_fit_start)
    num_batches = run.options.num_sanity_val_steps
    if run.batches.evaluated and num_batches and run.progress.global_step == 0:
        sanity_check(run, num_batches)
    if run.now.random_state is None:  # until here, random states are equal, so all ranks build identical models
        if not run.ranks.peers.is_alone:  # an unseeded run
            set_rng_state(run.ranks.peers.from_zero(rng_state()))
        separate_rng(run.ranks.data.world.rank)


def end_fit(run: Run) -> None:
    """Call the hooks after a fit that was not interrupted."""
    if run.now.is_interrupted:
        return
    if run.stop.received is not None:
        notice(f"{run.stop.received.name} was received after training had ended: the run is complete")
    call(run.hooks.on_fit_end)


def close_run(run: Run, status: str) -> None:
    """Close the engine and the loggers of ``run``. The model keeps its trained weights.

    Args:
        status: the status that the loggers receive: ``"success"``, ``"interrupted"`` or ``"failed"``.
    """
    run.results.stage = run.now.window = None
    end_background_save(run)
    run.engine.close()
    run.engine.hooks = StepHooks()  # the hooks reference the run, and the run references the optimizer states
    run.loggers.finalize(status)
