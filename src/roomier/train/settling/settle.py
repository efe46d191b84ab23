"""Settle a call, that is, determine its plan and its micro-batches before the model is built.

[Note: who plans]
Rank 0 reads a batch, chooses a plan, and sends it to the other ranks, so that all ranks build the same plan. Planning
does not change the run: the planner consumes no batches and no random numbers, and changes no weights. If the user
specifies the plan that the planner chose, the run produces bit-identical results.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from roomier.api.callback import kept_by
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core.device.rng import rng_state, set_rng_state
from roomier.core.errors import NoForecastError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.plan import Plan
from roomier.plan.parts import ChoicePlan
from roomier.planner.fake.shapes import shapes_of
from roomier.planner.hardware import this_machine
from roomier.planner.workload import Workload
from roomier.run.loaders import RunLoaders
from roomier.run.settled import Request, Settled, Start
from roomier.train.settling.checks import check_hooks_need_no_gradients
from roomier.train.settling.context import peers_check
from roomier.train.settling.job import keeps_micro_batch, with_global_batch
from roomier.train.step import transfer_to

if TYPE_CHECKING:  # the import loads torch's sharding, which one rank with an explicit strategy does not need
    from roomier.planner.choice import Choice


_ANY_NUM_STEPS = 1000.0  # number of steps for schedules during planning; the number does not affect memory


def settle(
    request: Request, data: RunLoaders, ranks: Ranks, *, start: Start | None = None, callbacks: Sequence[Any] = ()
) -> Settled:
    """Determine the facts of a run: a plan with a named strategy, and the corresponding micro-batches.

    Args:
        request: call to settle.
        data: the loaders. The function adjusts the size of their micro-batches to the returned plan.
        ranks: the ranks of the run. All ranks must call this function.
        start: the checkpoint and the folder of the run.
        callbacks: the callbacks of the run.

    Raises:
        RoomierError: no plan fits, the steps of the model cannot be forecast, or the batches cannot be split.
    """
    start = start or Start()
    settled = Settled(request, start, request.plan, data, ranks, callbacks)
    if not request.is_fit:
        settled = dataclasses.replace(settled, plan=_plan_without_forecast(request.plan))
    elif request.is_planned:
        try:
            settled = _planned(settled)
        except NoForecastError as error:
            if request.plan.parallel.strategy != "auto" or request.plan.choice.memory_budget_bytes is not None:
                raise
            plan = _plan_without_forecast(request.plan)
            if ranks.is_zero:
                notice(f"strategy='auto' uses {plan.parallel.strategy!r}, because no forecast is possible: {error}")
            settled = dataclasses.replace(settled, plan=plan)
    plan = settled.plan
    if request.cut is not None:
        plan = request.cut(plan, data, request)
    if start.batch is not None:
        plan = with_global_batch(plan, request.module, data, start.batch)
    if not ranks.is_alone:  # the plan determines which ranks read the same samples
        ranks = data.ranks = ranks.arranged(plan.parallel.mesh_on(ranks.world))
    return dataclasses.replace(settled, plan=plan, ranks=ranks)


def _planned(settled: Settled) -> Settled:
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
    chosen = choice.chosen
    assert chosen is not None
    if data.batch_size is not None and chosen.micro_batch != data.batch_size:
        data.set_batch_size(chosen.micro_batch)
    if settled.ranks.is_zero:
        _report(choice, asked)
    return dataclasses.replace(settled, plan=chosen.plan, choice=choice)


def _plan_without_forecast(asked: Plan) -> Plan:
    """Return ``asked`` with Lightning's meaning of ``strategy="auto"``: each rank has a full replica.

    In an evaluation, a later fit can then shard the model in any way.
    """
    if asked.parallel.strategy != "auto":
        return asked
    parallel = dataclasses.replace(asked.parallel, strategy="single" if asked.parallel.num_ranks == 1 else "ddp")
    return dataclasses.replace(asked, parallel=parallel, choice=ChoicePlan(asked.choice.memory_budget_bytes))


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
    batch = dataclasses.replace(chosen.plan.batch, accumulate_grad_batches=accumulate)
    return dataclasses.replace(chosen.plan, batch=batch)


def _choose(settled: Settled) -> Choice:
    """Choose a plan. Only rank 0 calls this function. The other ranks wait."""
    from roomier.planner.choosing.choose import choose  # late import: the module loads torch's sharding
    from roomier.planner.choosing.nearest import no_plan_fits  # late import: the module loads torch's sharding

    request, plan, module = settled.request, settled.plan, settled.request.module
    parallel, folder = plan.parallel, plan.offload.folder
    with alone(module):
        workload = _workload(settled)
        check_peers = peers_check(settled, workload)

        def check(candidate: Plan) -> None:
            check_hooks_need_no_gradients(candidate, settled.callbacks, module)
            check_peers(candidate)

        keeps = keeps_micro_batch(request, settled.data, workload.batch_size)
        machine = this_machine.this_machine(parallel.devices, parallel.num_nodes, parallel.accelerator, folder)
        choice = choose(workload, plan, machine, keeps_micro_batch=keeps, check=check)
        if choice.chosen is None:
            raise no_plan_fits(workload, plan, choice, keeps_micro_batch=keeps, check=check)
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
    else:
        notice(f"memory_budget: {choice.why}")
    if chosen.plan.batch.accumulate_grad_batches != asked.batch.accumulate_grad_batches:
        num_peers = chosen.plan.parallel.num_peers
        where = "rank" if num_peers == 1 else f"group of {num_peers} ranks"
        notice(
            f"a step uses {chosen.plan.batch.accumulate_grad_batches} micro-batches of {chosen.micro_batch} samples "
            f"on each {where}, with the same total. The gradient is the same if the loss is a mean or a sum over "
            "samples"
        )
