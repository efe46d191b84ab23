"""Choose a plan for a fit, or for a job that was restarted with too little memory for its plan.

[Note: who plans]
Rank 0 reads a batch, chooses a plan, and sends it to the other ranks, so that all ranks build the same plan. Planning
does not change the run: the planner consumes no batches and no random numbers, and changes no weights. If the user
specifies the plan that the planner chose, the run produces bit-identical results.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from roomier.api.callback import kept_by
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.checkpoint.record import read_record
from roomier.checkpoint.run_state import peek_run
from roomier.core.device.rng import rng_state, set_rng_state
from roomier.core.errors import NoForecastError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.plan import Plan
from roomier.planner.fake.shapes import shapes_of
from roomier.planner.hardware import this_machine
from roomier.planner.hardware.machine import Machine
from roomier.planner.workload import Workload
from roomier.run.loaders import RunLoaders
from roomier.run.settled import Settled
from roomier.train.settling.checks import check_hooks_need_no_gradients
from roomier.train.settling.context import peers_check
from roomier.train.settling.job import keeps_micro_batch, with_accumulation, with_global_batch
from roomier.train.step import transfer_to

if TYPE_CHECKING:  # the import loads torch's sharding, which one rank with an explicit strategy does not need
    from roomier.planner.choice import Choice


_ANY_NUM_STEPS = 1000.0  # number of steps for schedules during planning; the number does not affect memory

SMALL_SHARE = 0.01
"""Size of a checkpoint, as a fraction of the device memory, up to which a restarted job needs no forecast, because its
states fit on any number of ranks. A forecast runs the training step of the user."""


def may_not_fit(settled: Settled) -> bool:
    """Return whether the checkpoint of a restarted job was saved with a plan other than the requested one, for example
    on more ranks, so that the memory might not suffice for the requested plan."""
    path, plan = settled.start.checkpoint, settled.plan
    assert path is not None

    def is_large_and_differs() -> bool:
        if peek_run(path)["plan"] == plan.to_dict():
            return False
        stored_bytes = sum(each.size_bytes for each in read_record(path).files)
        return stored_bytes > SMALL_SHARE * _machine(plan).device.memory_bytes

    return settled.ranks.on_zero(is_large_and_differs)


def _machine(plan: Plan) -> Machine:
    parallel = plan.parallel
    return this_machine.this_machine(parallel.devices, parallel.num_nodes, parallel.accelerator, plan.offload.folder)


def planned(settled: Settled) -> Settled:
    """Return ``settled`` with a plan that the planner chooses, or with the plan of an earlier fit of this model."""
    request, data, start = settled.request, settled.data, settled.start
    asked, module, fitted = request.plan, request.module, request.fitted
    _check_optimizes_itself(asked, module)
    if fitted is not None and fitted.module is module and fitted.choice is not None:
        plan = _kept(fitted.choice, asked, data)
        return dataclasses.replace(settled, plan=plan, choice=fitted.choice)
    if start.batch is not None:
        plan = with_global_batch(asked, module, data, start.batch)
        settled = dataclasses.replace(settled, plan=plan)
    _ = data.train_loader  # created on all ranks, because the constructor may use collectives and random numbers
    choice = settled.ranks.on_zero(lambda: _choose(settled))
    if choice is None:
        return settled
    chosen = choice.chosen
    assert chosen is not None
    if data.batch_size is not None and chosen.micro_batch != data.batch_size:
        data.set_batch_size(chosen.micro_batch)
    if settled.ranks.is_zero:
        _report(choice, asked)
    return dataclasses.replace(settled, plan=chosen.plan, choice=choice)


def _check_optimizes_itself(asked: Plan, module: Module) -> None:
    if module.automatic_optimization:
        return
    field, value = "strategy", asked.parallel.strategy
    if value != "auto":
        field, value = "memory_budget", str(asked.choice.memory_budget_bytes)
    problem = (
        f"{type(module).__name__} uses manual optimization (automatic_optimization=False), so the memory of a step is "
        "unknown before it runs"
    )
    raise NoForecastError(field, value, problem, "Use a strategy such as 'zero3', and remove memory_budget")


def _kept(choice: Choice, asked: Plan, data: RunLoaders) -> Plan:
    """Return the plan of the earlier fit, because the model is still sharded. Micro-batches do not become larger."""
    chosen = choice.chosen
    assert chosen is not None
    given, accumulate = data.batch_size, asked.batch.accumulate_grad_batches
    if given is not None:
        fitting = next(size for size in range(min(given, chosen.micro_batch), 0, -1) if given % size == 0)
        accumulate *= given // fitting
        if fitting != given:
            data.set_batch_size(fitting)
    accumulate = accumulate * asked.parallel.num_data_ranks // chosen.plan.parallel.num_data_ranks
    return with_accumulation(chosen.plan, accumulate)


def _choose(settled: Settled) -> Choice | None:
    """Choose a plan. If the requested plan of a restarted job does not fit, choose among all exact plans. Return None
    if the plan of a job that is not planned fits. Only rank 0 calls this function. The other ranks wait."""
    # late imports: the modules load torch's sharding
    from roomier.planner.choosing.choose import budget_of, choose
    from roomier.planner.choosing.nearest import as_auto, no_plan_fits
    from roomier.planner.choosing.pricing import ClosedForms

    request, plan, module = settled.request, settled.plan, settled.request.module
    strategy = plan.parallel.strategy
    with alone(module):
        try:
            workload = _workload(settled)
            check_peers = peers_check(settled, workload)

            def check(candidate: Plan) -> None:
                check_hooks_need_no_gradients(candidate, settled.callbacks, module)
                check_peers(candidate)

            keeps = keeps_micro_batch(request, settled.data, workload.batch_size)
            machine = _machine(plan)
            prices = ClosedForms(workload, machine)
            if not request.is_planned and prices.estimate(plan, workload.batch_size).fits(budget_of(plan, machine)):
                return None
            choice = choose(workload, plan, machine, keeps_micro_batch=keeps, check=check, prices=prices)
            if choice.chosen is None and settled.start.batch is not None and strategy != "auto":
                plan = as_auto(plan)
                choice = choose(workload, plan, machine, keeps_micro_batch=keeps, check=check, prices=prices)
        except Exception as error:  # a restarted job must not fail because its plan has no forecast
            if request.is_planned:
                raise
            raise NoForecastError("strategy", strategy, f"has no forecast ({error})", "Use 'auto'") from error
        if choice.chosen is None:
            raise no_plan_fits(workload, plan, choice, keeps_micro_batch=keeps, check=check, prices=prices)
    return choice


class _PlanningTrainer:
    """The Trainer that a module uses while the planner runs. This Trainer has one rank and a fixed number of steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.ranks = Ranks()
        self.estimated_stepping_batches = _ANY_NUM_STEPS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


@contextmanager
def alone(module: Module) -> Iterator[None]:
    """Within the context, give ``module`` a Trainer that has one rank. On exit, restore Trainer and random state."""
    attached = [(part, vars(part)["_trainer"]) for part in module.modules() if vars(part).get("_trainer") is not None]
    state = rng_state()
    for part, trainer in attached:
        vars(part)["_trainer"] = _PlanningTrainer(trainer)
    try:
        yield
    finally:
        for part, trainer in attached:
            vars(part)["_trainer"] = trainer
        set_rng_state(state)


def on_host(settled: Settled, module: Module, batch: Any) -> Any:
    """Return ``batch`` as the hooks of ``module`` and of the DataModule transfer it to the host."""
    transfer = transfer_to(torch.device("cpu"), module, settled.request.datamodule)
    return batch if transfer is None else transfer(copy.deepcopy(batch))


def _workload(settled: Settled) -> Workload:
    module = settled.request.module
    workload = Workload.of(_built(module), on_host(settled, module, settled.data.first_batch()))
    return dataclasses.replace(workload, copies=kept_by(settled.callbacks))


def _built(module: Module) -> Module:
    """Return ``module``. If the module overrides ``configure_model``, return a copy on the meta device instead, after
    calling this hook of the copy."""
    if not overrides(module, "configure_model", Module):
        return module
    with torch.device("meta"):
        copied = shapes_of(module)
        copied.configure_model()
    return copied


def _report(choice: Choice, asked: Plan) -> None:
    from rich.console import Console

    from roomier.planner.report.tables import choice_table  # late import: the module loads torch's sharding

    chosen = choice.chosen
    assert chosen is not None
    if asked.parallel.strategy == "auto":
        Console(stderr=True).print(choice_table(choice))
        notice(f"strategy='auto' chose {choice.why}")
    elif dataclasses.replace(chosen.plan, batch=asked.batch) == asked:
        notice(f"memory_budget: {choice.why}")
    else:
        where = f"strategy={asked.parallel.strategy!r} does not fit on {asked.parallel.num_ranks} ranks"
        notice(f"{where}, so this restarted job uses {choice.why}")
    if chosen.plan.batch.accumulate_grad_batches != asked.batch.accumulate_grad_batches:
        num_peers = chosen.plan.parallel.num_peers
        where = "rank" if num_peers == 1 else f"group of {num_peers} ranks"
        notice(
            f"a step uses {chosen.plan.batch.accumulate_grad_batches} micro-batches of {chosen.micro_batch} samples "
            f"on each {where}, with the same total. The gradient is the same if the loss is a mean or a sum over "
            "samples"
        )
