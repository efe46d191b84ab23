"""Creates the optimizers of a run, from the module or from the Plan, and checks that these optimizers fit the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from roomier.api.lightning_module import LightningAdapter
from roomier.api.module import Module, network_of
from roomier.api.overrides import overrides
from roomier.core import torch_private
from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.engine.facts import Facts
from roomier.plan import Plan
from roomier.plan.levers import rounding_in_force
from roomier.techniques.optim.by_name import keeps_updates, make_optimizer
from roomier.techniques.optim.configured import (
    Configured,
    LRSchedulerConfig,
    check_ownership,
    check_schedulers,
    check_sharded_parameters,
    read_configured,
)
from roomier.techniques.optim.onebit_adam import onebit_options
from roomier.techniques.optim.schedule import make_schedule

ConfigureOptimizers = Callable[[Sequence[nn.Module]], Configured]
"""Function that receives the blocks of the network and returns optimizers and schedulers."""


def configure(
    plan: Plan, module: Module, num_steps: Callable[[], float], blocks: Sequence[nn.Module] | None = None
) -> Configured:
    """Return the optimizers of ``module``, or the optimizer that the Plan names.

    Args:
        num_steps: function that returns the number of optimizer steps of the run (infinite if unknown). Only schedules
            and 1-bit Adam call it.
        blocks: the blocks of the network. If None, they are found automatically.

    Raises:
        PlanError: both the module and the Plan define an optimizer, or, with automatic optimization, neither does. If
            ``configure_optimizers`` of a LightningModule returns None, a notice is printed instead, as in Lightning.
    """
    configured = read_configured(module.configure_optimizers())
    check_schedulers(configured, by_hand=not module.automatic_optimization)
    wanted = plan.optimizer
    if wanted.name is None:
        if configured.optimizers or not module.automatic_optimization:
            return configured
        if isinstance(module, LightningAdapter) and overrides(module, "configure_optimizers", Module):
            notice(f"{type(module).__name__}.configure_optimizers returned None, so this fit updates no parameters")
        else:
            raise PlanError(
                "optimizer",
                None,
                f"{type(module).__name__} configures no optimizer, and the Trainer was created without 'optimizer'",
                "Return one from configure_optimizers, or pass Trainer(optimizer='adamw', learning_rate=3e-4)",
            )
        return configured
    if configured.optimizers:
        problem = (
            f"{type(module).__name__}.configure_optimizers returns {type(configured.optimizers[0]).__name__} as well"
        )
        raise PlanError("optimizer", wanted.name, problem, "Remove one of the two")
    return configure_by_name(plan, network_of(module), num_steps, blocks)


def configure_by_name(
    plan: Plan, network: nn.Module, num_steps: Callable[[], float], blocks: Sequence[nn.Module] | None = None
) -> Configured:
    """Create the optimizer and the schedule that the Plan names. The arguments have the same meaning as in
    :func:`configure`."""
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
        blocks=blocks,
    )
    if wanted.schedule is None:
        return Configured([optimizer])
    schedule: LRScheduler = make_schedule(
        wanted.schedule,
        optimizer,
        num_steps(),
        warmup_steps=wanted.warmup_steps,
        log_warmup=wanted.log_warmup,
        min_lr_ratio=wanted.min_lr_ratio,
        decay_steps=wanted.decay_steps,
    )
    return Configured([optimizer], [LRSchedulerConfig(schedule, interval="step")])


def check_optimizers(plan: Plan, module: Module, configured: Configured) -> None:
    """Check that ``configured`` can update the parameters of ``module``, and print a notice if rounding discards small
    updates.

    Raises:
        RoomierError: an optimizer has parameters of a different module, or does not support sharded parameters.
    """
    check_ownership(configured, module.parameters())
    check_sharded_parameters(configured.optimizers)
    losing = [each for each in configured.optimizers if not keeps_updates(each)]
    if losing and plan.optimizer.weight_rounding is None:  # otherwise, the user selected the rounding
        names = " and ".join(sorted({type(optimizer).__name__ for optimizer in losing}))
        notice(
            f"bfloat16 weights: {names} rounds them to nearest, so most updates below 2^-9 of a weight are lost. "
            "Trainer(optimizer='adamw'), 'adamw8bit', 'adamw4bit' and 'lion' preserve these updates"
        )


def report_waiting_steps(facts: Facts, optimizers: Sequence[Optimizer]) -> None:
    """Print a notice for each optimizer whose step waits for the device because of the loss scale."""
    if facts.device.type == "cpu" or not facts.precision.scales_loss:
        return
    for optimizer in optimizers:
        if not torch_private.skips_on_device(optimizer):
            notice(
                f"16-mixed: {type(optimizer).__name__} is not fused, so in each step, the host waits until the device "
                "has checked for non-finite gradients. Pass fused=True if the optimizer has this argument"
            )
