"""Optimizer and scheduler of the options ``--optimizer`` and ``--lr_scheduler``, as in LightningCLI."""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import resolve_name
from types import MethodType
from typing import Any

from jsonargparse import Namespace
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from roomier.api.adapt import as_module
from roomier.api.module import Module
from roomier.api.overrides import is_one, overrides
from roomier.core.errors import RoomierError
from roomier.core.log import notice


def with_optimizer(config: Namespace, model: nn.Module) -> nn.Module:
    """Return ``model`` with the optimizer that ``config`` describes, if it describes one.

    Raises:
        RoomierError: the options contain a scheduler without an optimizer, or two optimizers.
    """
    optimizer, scheduler = config.get("optimizer"), config.get("lr_scheduler")
    if optimizer is None:
        if scheduler is not None:
            problem = "requires an optimizer, because the scheduler changes its learning rate"
            raise RoomierError("--lr_scheduler", scheduler.class_path, problem, "Pass --optimizer, such as AdamW")
        return model
    if config.trainer.optimizer is not None:
        action = "Pass only one of them"
        raise RoomierError("--optimizer", optimizer.class_path, "cannot be combined with --trainer.optimizer", action)

    def configured(parameters: Iterable[nn.Parameter]) -> Any:
        made = _made(optimizer, parameters)
        if scheduler is None:
            return made
        schedule = _made(scheduler, made)
        if not isinstance(schedule, ReduceLROnPlateau):
            return [made], [schedule]
        monitor = getattr(schedule, "monitor", None)  # an argument of Lightning's subclass
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "monitor": monitor}}

    if not is_one(model, Module):
        model = as_module(model)
    elif overrides(model, "configure_optimizers", Module):
        notice(f"{optimizer.class_path} replaces the optimizer that configure_optimizers of the model returns")
    vars(model)["configure_optimizers"] = MethodType(lambda self: configured(self.parameters()), model)
    return model


def _made(given: Namespace, first: Any) -> Any:
    arguments = given.get("init_args")
    return resolve_name(given.class_path)(first, **({} if arguments is None else arguments.as_dict()))
