"""What ``configure_optimizers`` may return, read into one form."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from roomier.core.errors import RoomierError, did_you_mean
from roomier.optim.local import is_cut

FIELD = "configure_optimizers"
# What torch 2.13 lacks of them for DTensor is found at their first step.
_OF_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.Rprop)
_FUSED_OF_WHOLE_TENSORS = (torch.optim.SGD, torch.optim.Adagrad)


@dataclass
class LRSchedulerConfig:
    """A scheduler and when it steps.

    Attributes:
        interval: ``"epoch"`` or ``"step"`` (optimizer steps).
        frequency: it steps every so many intervals.
        reduce_on_plateau: its ``step`` takes the value of ``monitor``.
        monitor: the logged metric it looks at.
        strict: a missing ``monitor`` is an error, not a notice.
        name: how LearningRateMonitor calls it.
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
    """The optimizers of a module and their schedulers."""

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)


def read_configured(returned: Any) -> Configured:
    """The one form of what ``configure_optimizers`` returned.

    Raises:
        RoomierError: it is none of the documented forms.
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
    raise RoomierError(
        FIELD,
        returned,
        "is none of the forms that are known",
        "Return an optimizer, a list of them, ([optimizers], [schedulers]), "
        "or a dict with 'optimizer' and 'lr_scheduler'",
    )


def check_ownership(configured: Configured, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse an optimizer of other parameters, and a scheduler of another optimizer: neither would train the model.

    Args:
        parameters: all of the model's.

    Raises:
        RoomierError: says which.
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
                f"{num_foreign} of its {len(held)} parameters do not belong to the module, so no checkpoint holds them",
                "Make it over self.parameters(), after the last layer is built; "
                "make tensors of your own parameters of the module",
            )
    for config in configured.schedulers:
        if isinstance(config.scheduler, LRScheduler):
            # Groups and not optimizers are compared: an optimizer around another one shares them.
            steered = [id(group) for group in config.scheduler.optimizer.param_groups]
            if not any(id(group) in steered for group in groups):
                raise RoomierError(
                    f"{FIELD}: lr_scheduler",
                    type(config.scheduler).__name__,
                    "belongs to another optimizer, so it would change nothing here",
                    "Make it over the optimizer that is returned",
                )


def check_cut_parameters(optimizers: Iterable[Optimizer]) -> None:
    """Refuse an optimizer whose first step would fail on parameters that are cut among ranks.

    Raises:
        RoomierError: names it.
    """
    for optimizer in optimizers:
        cut_groups = [group for group in optimizer.param_groups if any(map(is_cut, group["params"]))]
        if not cut_groups:
            continue
        problem = action = ""
        if any(kind.__module__.startswith("bitsandbytes.") for kind in type(optimizer).__mro__):
            problem = "its kernels take whole tensors"
            action = "Use Trainer(optimizer='adamw8bit'), whose states are cut as well"
        elif type(optimizer) in _OF_WHOLE_TENSORS:
            problem = "of torch takes whole tensors"
            action = "Use torch.optim.AdamW, whose states are cut as well"
        elif type(optimizer) in _FUSED_OF_WHOLE_TENSORS and any(group.get("fused") for group in cut_groups):
            problem = "with fused=True takes whole tensors"
            action = "Leave out fused=True"
        if problem:
            problem += ", and the strategy cuts parameters among the ranks"
            raise RoomierError(FIELD, type(optimizer).__name__, problem, f"{action}, or use strategy='ddp'")


def _from_mapping(returned: Mapping[str, Any]) -> Configured:
    known = {"optimizer", "lr_scheduler", "monitor"}
    for key in returned:
        if key not in known:
            raise RoomierError(FIELD, key, "is not a key of the dictionary", did_you_mean(key, known))
    optimizer = returned.get("optimizer")
    if not isinstance(optimizer, Optimizer):
        raise RoomierError(FIELD, optimizer, "'optimizer' is not a torch.optim.Optimizer", "Put the optimizer there")
    scheduler = returned.get("lr_scheduler")
    if scheduler is None:
        return Configured([optimizer])
    return Configured([optimizer], [_scheduler(scheduler, returned.get("monitor"))])


def _scheduler(given: Any, monitor: str | None = None) -> LRSchedulerConfig:
    if isinstance(given, Mapping):
        known = set(LRSchedulerConfig.__dataclass_fields__)
        for key in given:
            if key not in known:
                raise RoomierError(f"{FIELD}: lr_scheduler", key, "is not a known key", did_you_mean(key, known))
        if "scheduler" not in given:
            raise RoomierError(
                f"{FIELD}: lr_scheduler", dict(given), "has no 'scheduler'", "Put the scheduler under 'scheduler'"
            )
        config = LRSchedulerConfig(**{"monitor": monitor, **given})
    else:
        config = LRSchedulerConfig(given, monitor=monitor)
    if isinstance(config.scheduler, Optimizer) or not callable(getattr(config.scheduler, "step", None)):
        raise RoomierError(
            f"{FIELD}: lr_scheduler", config.scheduler, "is not a scheduler", "Pass a torch.optim.lr_scheduler object"
        )
    if config.interval not in ("epoch", "step"):
        raise RoomierError(f"{FIELD}: interval", config.interval, "is unknown", "Use 'epoch' or 'step'")
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise RoomierError(f"{FIELD}: frequency", config.frequency, "is not a positive integer", "Use 1 or more")
    if isinstance(config.scheduler, ReduceLROnPlateau):
        config.reduce_on_plateau = True
    if config.reduce_on_plateau and config.monitor is None:
        raise RoomierError(
            f"{FIELD}: monitor",
            None,
            "ReduceLROnPlateau needs the name of a logged metric",
            "Return {'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}",
        )
    return config
