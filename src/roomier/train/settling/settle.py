"""``strategy="auto"`` and ``memory_budget``: the plan of a fit is settled before anything of it is built.

[Note: who plans]
Rank 0 looks at a batch, plans, and tells the others, which wait: all ranks build the same plan. Nothing of the run
moves by it: no batch is consumed, no random number drawn, no weight touched. With the chosen plan given by name the run
is the same, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from roomier.api.kept_weights import kept_by
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.rng import rng_state, set_rng_state
from roomier.plan import Plan
from roomier.plan.parts import ChoicePlan
from roomier.run.global_batch import GlobalBatch
from roomier.run.loaders import RunLoaders
from roomier.train.settling.checks import check_hooks_need_no_gradients
from roomier.train.settling.job import keep_global_batch
from roomier.train.settling.micro_batch import keeps_micro_batch
from roomier.train.step import transfer_to

if TYPE_CHECKING:  # they load torch's sharding, which a run with a strategy by name on one rank does not need
    from roomier.planner.choice import Choice
    from roomier.planner.workload import Workload
    from roomier.trainer import Trainer

_ANY_NUM_STEPS = 1000.0  # of the run, for schedules: none of them changes a byte


def is_planned(trainer: Trainer) -> bool:
    """Whether the plan of a fit is chosen when it begins."""
    asked = trainer.asked_plan
    return asked.parallel.strategy == "auto" or asked.choice.memory_budget_bytes is not None


def settle_plan(
    trainer: Trainer, stage: str, module: Module, data: RunLoaders, earlier: GlobalBatch | None = None
) -> None:
    """Set ``trainer.plan`` to one with a strategy by name, and the micro-batches of ``data`` to what goes with it.

    Args:
        earlier: the global batch of the run that this one goes on with after a restart.

    Raises:
        RoomierError: nothing fits, or the model's steps cannot be forecast.
    """
    asked = trainer.asked_plan
    if not is_planned(trainer):
        return
    if stage != "fit":
        if trainer.plan.parallel.strategy == "auto":
            trainer.plan = _plan_of_evaluation(asked)
        return
    _check_optimizes_itself(asked, module)
    earlier_fit = trainer.fitted
    if earlier_fit is not None and earlier_fit.module is module and trainer.choice is not None:
        _keep_choice(trainer, trainer.choice, data)
        return
    trainer.plan = asked
    if earlier is not None:
        keep_global_batch(trainer, module, data, earlier)
    _ = data.train_loader  # made by all ranks, which may meet in it, and with random numbers of the run
    trainer.choice = choice = trainer.ranks.on_zero(lambda: _choose(trainer, module, data))
    chosen = choice.chosen
    assert chosen is not None
    trainer.plan = chosen.plan
    if data.batch_size is not None and chosen.micro_batch != data.batch_size:
        data.set_batch_size(chosen.micro_batch)
    if trainer.is_global_zero:
        _tell(choice, asked)


def _plan_of_evaluation(asked: Plan) -> Plan:
    # Whole on each rank: a fit that comes after may cut the model in any way.
    strategy = "single" if asked.parallel.num_ranks == 1 else "ddp"
    parallel = dataclasses.replace(asked.parallel, strategy=strategy)
    return dataclasses.replace(asked, parallel=parallel, choice=ChoicePlan(asked.choice.memory_budget_bytes))


def _check_optimizes_itself(asked: Plan, module: Module) -> None:
    if module.automatic_optimization:
        return
    field, value = "strategy", asked.parallel.strategy
    if value != "auto":
        field, value = "memory_budget", str(asked.choice.memory_budget_bytes)
    problem = (
        f"{type(module).__name__} optimizes by hand (automatic_optimization=False): what a step holds is known when it "
        "runs"
    )
    raise RoomierError(field, value, problem, "Name a strategy such as 'zero3', and leave out memory_budget")


def _keep_choice(trainer: Trainer, choice: Choice, data: RunLoaders) -> None:
    """A model that was fitted already stays as it was cut; the micro-batch stays within what was planned."""
    chosen, asked = choice.chosen, trainer.asked_plan
    assert chosen is not None
    given, accumulate = data.batch_size, asked.batch.accumulate_grad_batches
    if given is not None:
        fitting = next(size for size in range(min(given, chosen.micro_batch), 0, -1) if given % size == 0)
        accumulate *= given // fitting
        if fitting != given:
            data.set_batch_size(fitting)
    batch = dataclasses.replace(chosen.plan.batch, accumulate_grad_batches=accumulate)
    trainer.plan = dataclasses.replace(chosen.plan, batch=batch)


def _choose(trainer: Trainer, module: Module, data: RunLoaders) -> Choice:
    """On rank 0, while the others wait."""
    from roomier.hardware.this_machine import this_machine
    from roomier.planner.choosing.choose import choose
    from roomier.planner.choosing.nearest import nothing_fits

    plan, parallel = trainer.plan, trainer.plan.parallel

    def check(candidate: Plan) -> None:
        check_hooks_need_no_gradients(candidate, trainer.callbacks, module)

    with _alone(trainer):
        workload = _workload(trainer, module, data)
        keeps = keeps_micro_batch(trainer, data, workload.batch_size)
        machine = this_machine(parallel.devices, parallel.num_nodes, parallel.accelerator)
        choice = choose(workload, plan, machine, keeps_micro_batch=keeps, check=check)
        if choice.chosen is None:
            raise nothing_fits(workload, plan, choice, keeps_micro_batch=keeps, check=check)
    return choice


@contextmanager
def _alone(trainer: Trainer) -> Iterator[None]:
    """Inside, what the module asks its Trainer needs no other rank, and random numbers may be drawn."""
    ranks, estimate_steps, state = trainer.ranks, trainer.estimate_steps, rng_state()
    trainer.ranks, trainer.estimate_steps = Ranks(), lambda: _ANY_NUM_STEPS
    try:
        yield
    finally:
        trainer.ranks, trainer.estimate_steps = ranks, estimate_steps
        set_rng_state(state)


def _workload(trainer: Trainer, module: Module, data: RunLoaders) -> Workload:
    from roomier.planner.workload import Workload

    batch = data.first_batch()
    transfer = transfer_to(torch.device("cpu"), module, trainer.datamodule)
    if transfer is not None:
        batch = transfer(copy.deepcopy(batch))
    return dataclasses.replace(Workload.of(_built(module), batch), copies=kept_by(trainer.callbacks))


def _built(module: Module) -> Module:
    """``module``, or a copy as its ``configure_model`` will leave it, as shapes."""
    if not overrides(module, "configure_model", Module):
        return module
    from roomier.planner.fake.shapes import shapes_of

    with torch.device("meta"):
        copied = shapes_of(module)
        copied.configure_model()
    return copied


@contextmanager
def naming_nearest(plan: Plan, module: Module) -> Iterator[None]:
    """What a build inside refuses of ``plan`` is told with the nearest plan that can be built for ``module``."""
    try:
        yield
    except RoomierError as error:
        from roomier.planner.choosing.keywords import trainer_keywords
        from roomier.planner.choosing.nearest_legal import can_build, with_nearest

        asked = trainer_keywords(plan)
        if error.field.partition(".")[0] not in asked:
            raise
        fixed = ("devices", "num_nodes")  # these ranks are there
        raise with_nearest(error, asked, lambda each: can_build(each, module), fixed=fixed) from error.__cause__


def _tell(choice: Choice, asked: Plan) -> None:
    from rich.console import Console

    from roomier.planner.tables import choice_table

    chosen = choice.chosen
    assert chosen is not None
    if asked.parallel.strategy == "auto":
        Console(stderr=True).print(choice_table(choice))
        notice(f"strategy='auto' chose {choice.why}")
    else:
        notice(f"memory_budget: {choice.why}")
    if chosen.plan.batch.accumulate_grad_batches != asked.batch.accumulate_grad_batches:
        notice(
            f"a step takes {chosen.plan.batch.accumulate_grad_batches} micro-batches of {chosen.micro_batch} samples "
            "on each rank: as many as before, with the same gradient where the loss is a mean or a sum over samples"
        )
