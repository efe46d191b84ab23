"""From a Plan and a module to an engine. The order is the design: see the reason on each line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from roomier.adapters.found import tell_unnamed
from roomier.adapters.lora import apply_lora, quantise_base
from roomier.api.adapt import as_module
from roomier.api.blocks import find_blocks
from roomier.api.module import Module
from roomier.api.wrapped import network_of
from roomier.core import torch_fake, torch_private
from roomier.core.device import resolve_device
from roomier.core.errors import PlanError, RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.engine.divide import divide
from roomier.engine.eager import EagerEngine
from roomier.engine.levers import apply_levers
from roomier.engine.materialise import cuts_parameters, take_weights
from roomier.engine.parallel import Parallel
from roomier.engine.prepared import PreparedEngine
from roomier.engine.step_in_backward import StepInBackward
from roomier.engine.weights_file import WeightsToRead
from roomier.launch import join, place, present_launch
from roomier.optim.by_name import keeps_updates, make_optimizer
from roomier.optim.configured import (
    Configured,
    LRSchedulerConfig,
    check_cut_parameters,
    check_ownership,
    read_configured,
)
from roomier.optim.onebit_adam import onebit_options
from roomier.optim.schedule import make_schedule
from roomier.plan import Plan
from roomier.plan.lever_rules import rounding_in_force
from roomier.precision.policy import precision_of, set_matmul_precision

ConfigureOptimizers = Callable[[], Configured]
AnyEngine = TypeVar("AnyEngine", bound=EagerEngine)


def build(
    plan: Plan,
    module: Module,
    configure_optimizers: ConfigureOptimizers,
    engine_class: type[AnyEngine],
    ranks: Ranks,
    weights: WeightsToRead | None = None,
) -> tuple[AnyEngine, Configured]:
    """Apply the techniques of ``plan`` to ``module``, in place, and return what runs it.

    Args:
        configure_optimizers: called once the parameters are final; returns optimizers and schedulers.
        ranks: among which the model and each batch are divided.
        weights: what ``module`` begins with, in the place of the values it has.

    Raises:
        RoomierError: the device is not there, the optimizer cannot be made, ``weights`` does not fit, or a part of a
            model that is on ``meta`` gets no values.
    """
    device = resolve_device(plan.parallel.accelerator)
    precision = precision_of(plan.precision.mode, device)
    network = network_of(module)
    _check_network(network)
    _check_loss_reduction(module)
    _check_budget(plan, module)
    tell_unnamed(plan, network)
    given = None if weights is None else weights.check(network)
    if plan.adapter.lora_rank is not None:
        apply_lora(network, find_blocks(network), plan.adapter)  # parameters of its own; files have none of them
    taken = take_weights(network, plan, ranks, given=given)  # first: what is cut later is not held whole until then
    precision.convert_module(network)  # everything after it sizes itself by the dtype of the weights
    if taken is None:
        if not torch_fake.makes_fake_tensors():  # those are there, and cannot be swapped
            module.to(device)  # before the optimizer, which makes its states beside the parameters
    elif not cuts_parameters(plan, ranks):
        taken.put_back(network, network, device)  # DDP reads what it wraps
    levers = apply_levers(plan, network, device, precision, ranks)  # before what gathers around them
    with ExitStack() as on_failure:
        on_failure.callback(levers.undo)
        by_hand = not module.automatic_optimization
        parallel = divide(plan, network, device, precision, ranks, by_hand=by_hand)  # it replaces what it cuts
        if taken is not None and parallel is not None and cuts_parameters(plan, ranks):
            taken.put_back(parallel.runner, network, device)  # each rank has memory for its part alone
        if weights is not None:
            weights.read_into(network)
        if plan.adapter.frozen_base != "as_is":
            quantise_base(network, plan.adapter)  # of the values that the model begins with
        configured = configure_optimizers()  # last: it must hold the parameters as they will be updated
        check_ownership(configured, module.parameters())
        check_cut_parameters(configured.optimizers)
        _say_what_is_lost(plan, configured.optimizers)
        updates = _updates_in_backward(plan, module, configured.optimizers, parallel)
        engine = engine_class(
            network,
            configured.optimizers,
            device=device,
            precision=precision,
            batch_plan=plan.batch,
            count_terms=module.num_loss_terms if module.loss_reduction == "mean" else None,
            ranks=ranks,
            parallel=parallel,
            levers=levers,
            updates=updates,
        )
        on_failure.pop_all()
    if engine.scaler.is_on:
        _say_which_steps_wait(configured.optimizers, device)
    return engine, configured


def _updates_in_backward(
    plan: Plan, module: Module, optimizers: Sequence[Optimizer], parallel: Parallel | None
) -> StepInBackward | None:
    way = plan.optimizer.step_in_backward
    if way == "none" or not optimizers:
        return None
    if not module.automatic_optimization:
        problem = "the module optimizes by hand (automatic_optimization=False): its training_step says when to step"
        raise PlanError("optimizer.step_in_backward", way, problem, "Leave it out, or let the Trainer step")
    network = network_of(module)
    return StepInBackward(
        network,
        optimizers,
        find_blocks(network),
        way=way,
        batch_plan=plan.batch,
        join_norms=_join_norms if parallel is None else parallel.join_norms,
        late=() if parallel is None else parallel.late_parameters,
    )


def _join_norms(norms: Mapping[Tensor, Tensor]) -> Tensor:
    return torch_private.join_norms(list(norms.values()))


def _check_network(network: nn.Module) -> None:
    tensors = itertools.chain(network.named_parameters(), network.named_buffers())
    for name, tensor in tensors:
        if is_lazy(tensor):
            action = "Call the model on one batch before fit: that gives its lazy layers their shapes"
            raise RoomierError("model", name, "is lazy and has no shape yet", action)


def _check_budget(plan: Plan, module: Module) -> None:
    if plan.activation.policy == "budget" and not module.automatic_optimization:
        problem = (
            "is kept by what is measured over a step, and the module optimizes by hand (automatic_optimization=False)"
        )
        action = "Use activation_checkpointing='full', 'every_n' or 'selective', or let the Trainer step"
        raise PlanError("activation.policy", "budget", problem, action)


def _check_loss_reduction(module: Module) -> None:
    if module.loss_reduction not in ("mean", "sum"):
        action = "Use 'mean' or 'sum': what the loss of a micro-batch is of its terms"
        raise RoomierError("loss_reduction", module.loss_reduction, "is not known", action)


def configure(plan: Plan, module: Module, num_steps: Callable[[], float]) -> Configured:
    """The optimizers of ``module``: its own, or the one the Plan names; never both.

    Args:
        num_steps: gives the optimizer steps of the run, infinite where unknown; asked only if a schedule needs it.

    Raises:
        PlanError: both, or neither, say how to optimize.
    """
    configured = read_configured(module.configure_optimizers())
    wanted = plan.optimizer
    if wanted.name is None:
        if not configured.optimizers and module.automatic_optimization:
            raise PlanError(
                "optimizer",
                None,
                f"{type(module).__name__} configures no optimizer and the Trainer names none",
                "Return one from configure_optimizers, or pass Trainer(optimizer='adamw', learning_rate=3e-4)",
            )
        return configured
    if configured.optimizers:
        raise PlanError(
            "optimizer",
            wanted.name,
            f"{type(module).__name__}.configure_optimizers returns {type(configured.optimizers[0]).__name__} as well",
            "Remove one of the two",
        )
    return configure_by_name(plan, network_of(module), num_steps)


def configure_by_name(plan: Plan, network: nn.Module, num_steps: Callable[[], float]) -> Configured:
    """The optimizer and schedule that a Plan names."""
    wanted, options = plan.optimizer, dict(plan.optimizer.options)
    assert wanted.name is not None
    if wanted.name == "onebit_adam":
        options = onebit_options(options, num_steps, wanted.warmup_steps, cuts=plan.parallel.strategy == "zero1")
    optimizer = make_optimizer(
        wanted.name,
        network,
        lr=wanted.lr,
        weight_decay=wanted.weight_decay,
        options=options,
        weight_rounding=rounding_in_force(plan),
    )
    if wanted.schedule is None:
        return Configured([optimizer])
    schedule: LRScheduler = make_schedule(
        wanted.schedule,
        optimizer,
        num_steps(),
        warmup_steps=wanted.warmup_steps,
        min_lr_ratio=wanted.min_lr_ratio,
    )
    return Configured([optimizer], [LRSchedulerConfig(schedule, interval="step")])


def prepare(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    max_steps: int | None = None,
) -> PreparedEngine:
    """The engine the Trainer uses, for a training loop of your own.

    ::

        engine = roomier.prepare(model, optimizer, plan=roomier.Plan())
        for batches in windows:
            loss = engine.forward_backward(training_step, batches)
            engine.step()

    ``engine.step()`` clips the gradients as ``plan`` says. Where you call ``engine.clip(...)`` before it, your call
    is the one that counts: for another bound, or for the norm it returns.

    Args:
        module: any ``nn.Module``; moved and converted in place.
        optimizer: over its parameters; None takes the one ``plan`` names.
        plan: a Plan, a mapping, or the path of a YAML or JSON file; None is ``Plan()``.
        max_steps: length of the run, for a schedule that ``plan`` names; step it as ``engine.scheduler``.

    Raises:
        PlanError: no optimizer, or two; or ``plan`` is none.
    """
    plan = Plan() if plan is None else Plan.of(plan)
    given = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)

    def optimizers() -> Configured:
        if given and plan.optimizer.name is not None:
            raise PlanError(
                "optimizer", plan.optimizer.name, "an optimizer was passed as well", "Remove one of the two"
            )
        if given:
            return Configured(given)
        if plan.optimizer.name is None:
            raise PlanError("optimizer", None, "none was passed and the plan names none", "Pass one")
        return configure_by_name(plan, network_of(wrapped), lambda: max_steps or float("inf"))

    wrapped = as_module(module)
    world = place(plan.parallel.devices, plan.parallel.num_nodes, present_launch())
    ranks = join(world, resolve_device(plan.parallel.accelerator).type)
    engine, configured = build(plan, wrapped, optimizers, PreparedEngine, ranks)
    engine.scheduler = configured.schedulers[0].scheduler if configured.schedulers else None
    set_matmul_precision(plan.precision.matmul)
    return engine


def _say_what_is_lost(plan: Plan, optimizers: Sequence[Optimizer]) -> None:
    if plan.optimizer.weight_rounding is not None:  # it was asked for
        return
    losing = [each for each in optimizers if not keeps_updates(each)]
    if losing:
        names = " and ".join(sorted({type(optimizer).__name__ for optimizer in losing}))
        notice(
            f"bfloat16 weights: {names} rounds them as it does; most lose updates below 2^-9 of a weight. "
            "Trainer(optimizer='adamw'), 'adamw8bit', 'adamw4bit' and 'lion' keep them"
        )


def _say_which_steps_wait(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    if device.type == "cpu":
        return  # there is no queue of work to wait for
    for optimizer in optimizers:
        if not torch_private.skips_on_device(optimizer):
            notice(
                f"16-mixed: {type(optimizer).__name__} is not fused, so each step waits for one flag of the device; "
                "pass fused=True where the optimizer has it"
            )
