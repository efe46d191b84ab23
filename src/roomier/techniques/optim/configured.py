"""Conversion of the return values of ``configure_optimizers`` to a common form."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from roomier.core.errors import RoomierError, check_integer, did_you_mean
from roomier.core.sharded import is_sharded

FIELD = "configure_optimizers"
# torch 2.13 lacks the DTensor operations that these optimizers require, so their first step would fail.
_OF_WHOLE_TENSORS: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "Use roomier.techniques.optim.adafactor.Adafactor, which has the same arguments",
    torch.optim.Rprop: "Use torch.optim.AdamW, which shards its states",
}
_FUSED_OF_WHOLE_TENSORS = (torch.optim.SGD, torch.optim.Adagrad)


@dataclass
class LRSchedulerConfig:
    """A learning rate scheduler and its settings.

    Attributes:
        scheduler: scheduler to step.
        interval: ``"epoch"`` or ``"step"``. With ``"step"``, the scheduler steps only after an optimizer step.
        frequency: number of epochs, or of micro-batches in the epoch, per step of the scheduler. Lightning also counts
            micro-batches.
        reduce_on_plateau: whether ``step`` accepts the value of ``monitor``.
        monitor: name of the logged metric that ``step`` receives.
        strict: whether a missing ``monitor`` raises an error instead of printing a notice.
        name: name under which LearningRateMonitor logs the learning rate.
    """

    scheduler: Any
    interval: Literal["epoch", "step"] = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True
    name: str | None = None


@dataclass
class Configured:
    """Optimizers of a module and their schedulers.

    Attributes:
        optimizers: optimizers, in the order in which the module returned them.
        schedulers: schedulers with their settings.
    """

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)


def read_configured(returned: Any) -> Configured:
    """Convert the value that ``configure_optimizers`` returned.

    Raises:
        RoomierError: the form of the value is not supported.
    """
    if returned is None:
        return Configured()
    if isinstance(returned, Optimizer):
        return Configured([returned])
    if isinstance(returned, Mapping):
        return _from_mapping(returned)
    if isinstance(returned, Sequence) and not isinstance(returned, str) and returned:
        if all(isinstance(item, Optimizer) for item in returned):
            return Configured(list(returned))
        if all(isinstance(item, Mapping) for item in returned):
            parts = [_from_mapping(item) for item in returned]
            return Configured(
                [optimizer for part in parts for optimizer in part.optimizers],
                [scheduler for part in parts for scheduler in part.schedulers],
            )
        if len(returned) == 2 and all(isinstance(item, Sequence) for item in returned):
            optimizers, schedulers = returned
            if all(isinstance(item, Optimizer) for item in optimizers):
                return Configured(list(optimizers), [_scheduler(item) for item in schedulers])
    action = (
        "Return an optimizer, a list of optimizers, ([optimizers], [schedulers]), "
        "or a dict with 'optimizer' and 'lr_scheduler'"
    )
    raise RoomierError(FIELD, returned, "is not a supported return value", action)


def check_schedulers(configured: Configured, *, by_hand: bool = False) -> None:
    """Check that each scheduler can be saved, and that the loop can step it.

    Args:
        by_hand: True if the module steps its schedulers (manual optimization).

    Raises:
        RoomierError: a scheduler lacks a method, or requires a metric but has no ``monitor``.
    """
    method = "state_dict" if by_hand else "step"
    for config in configured.schedulers:
        if isinstance(config.scheduler, Optimizer) or not callable(getattr(config.scheduler, method, None)):
            action = "Pass a torch.optim.lr_scheduler object"
            raise RoomierError(f"{FIELD}: lr_scheduler", config.scheduler, "is not a scheduler", action)
        if config.reduce_on_plateau and config.monitor is None and not by_hand:
            action = "Return {'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}"
            raise RoomierError(
                f"{FIELD}: monitor", None, "ReduceLROnPlateau requires the name of a logged metric", action
            )


def check_ownership(configured: Configured, parameters: Iterable[nn.Parameter]) -> None:
    """Reject an optimizer of parameters that are not in the model, and a scheduler of a different optimizer. Such
    parameters are not saved, and such a scheduler has no effect.

    Args:
        configured: optimizers and schedulers of the module.
        parameters: all parameters of the model.

    Raises:
        RoomierError: an optimizer or scheduler does not belong to the model. The error contains the class name.
    """
    own = {id(parameter) for parameter in parameters}
    groups = [group for optimizer in configured.optimizers for group in optimizer.param_groups]
    for optimizer in configured.optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        num_foreign = sum(id(parameter) not in own for parameter in held)
        if num_foreign:
            raise RoomierError(
                FIELD,
                type(optimizer).__name__,
                f"{num_foreign} of its {len(held)} parameters are not in the module, so checkpoints do not store them",
                "Create the optimizer with self.parameters() after the last layer is created; "
                "register custom tensors as parameters of the module",
            )
    for config in configured.schedulers:
        if isinstance(config.scheduler, LRScheduler):
            # Groups are compared instead of optimizers, because a wrapper of an optimizer shares the optimizer's
            # groups.
            steered = [id(group) for group in config.scheduler.optimizer.param_groups]
            if not any(id(group) in steered for group in groups):
                problem = "belongs to another optimizer, so it has no effect"
                action = "Create the scheduler with the optimizer that configure_optimizers returns"
                raise RoomierError(f"{FIELD}: lr_scheduler", type(config.scheduler).__name__, problem, action)


def check_sharded_parameters(optimizers: Iterable[Optimizer]) -> None:
    """Reject an optimizer whose first step would fail on sharded parameters.

    Raises:
        RoomierError: an optimizer does not support sharded parameters. The error contains the class name of the
            optimizer.
    """
    for optimizer in optimizers:
        cut_groups = [group for group in optimizer.param_groups if any(map(is_sharded, group["params"]))]
        if not cut_groups:
            continue
        problem = action = ""
        if any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__):
            problem = "requires unsharded tensors in its kernels"
            action = "Use Trainer(optimizer='adamw8bit'), which shards its states"
        elif type(optimizer) in _OF_WHOLE_TENSORS:
            problem = "of torch requires unsharded tensors"
            action = _OF_WHOLE_TENSORS[type(optimizer)]
        elif type(optimizer) in _FUSED_OF_WHOLE_TENSORS and any(group.get("fused") for group in cut_groups):
            problem = "with fused=True requires unsharded tensors"
            action = "Remove fused=True"
        if problem:
            problem += ", but the strategy shards parameters across ranks"
            raise RoomierError(FIELD, type(optimizer).__name__, problem, f"{action}, or use strategy='ddp'")


def _from_mapping(returned: Mapping[str, Any]) -> Configured:
    known = {"optimizer", "lr_scheduler", "monitor"}
    for key in returned:
        if key not in known:
            raise RoomierError(FIELD, key, "is not a valid key of the dict", did_you_mean(key, known))
    optimizer = returned.get("optimizer")
    if not isinstance(optimizer, Optimizer):
        raise RoomierError(
            FIELD, optimizer, "'optimizer' must be a torch.optim.Optimizer", "Set this key to an optimizer"
        )
    scheduler = returned.get("lr_scheduler")
    if scheduler is None:
        return Configured([optimizer])
    return Configured([optimizer], [_scheduler(scheduler, returned.get("monitor"))])


def _scheduler(given: Any, monitor: str | None = None) -> LRSchedulerConfig:
    if isinstance(given, Mapping):
        known = set(LRSchedulerConfig.__dataclass_fields__)
        for key in given:
            if key not in known:
                raise RoomierError(f"{FIELD}: lr_scheduler", key, "is not a valid key", did_you_mean(key, known))
        if "scheduler" not in given:
            raise RoomierError(
                f"{FIELD}: lr_scheduler", dict(given), "requires the key 'scheduler'", "Add the scheduler"
            )
        config = LRSchedulerConfig(**{"monitor": monitor, **given})
    else:
        config = LRSchedulerConfig(given, monitor=monitor)
    if config.interval not in ("epoch", "step"):
        raise RoomierError(f"{FIELD}: interval", config.interval, "is invalid", "Use 'epoch' or 'step'")
    check_integer(f"{FIELD}: frequency", config.frequency, 1, "Use 1 or more")
    if isinstance(config.scheduler, ReduceLROnPlateau):
        config.reduce_on_plateau = True
    return config
