"""DeepSpeed configurations for ``roomier plan``: in ``--deepspeed``, ``--trainer.strategy`` or ``--trainer.plan``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from roomier.core.errors import RoomierError
from roomier.plan.migrate.deepspeed.objects import is_source
from roomier.trainer import Trainer
from roomier.trainer.keywords.other_libraries import of_roomier

if TYPE_CHECKING:
    from roomier.planner.hardware.machine import Machine


def take_deepspeed(config: Namespace, given: set[str]) -> Any:
    """Remove the DeepSpeed configuration from ``config``, and return this configuration; None if ``config`` contains
    none.

    Args:
        config: the parsed options.
        given: names of the Trainer options on the command line. The option that contained the configuration is removed
            from this set.

    Raises:
        RoomierError: two options contain a configuration.
    """
    found = {} if config.deepspeed is None else {"deepspeed": config.deepspeed}
    for name in ("strategy", "plan"):
        value = config.trainer[name]
        if value is not None and is_source(value, of_plan=name == "plan"):
            found[f"trainer.{name}"] = value
            config.trainer[name] = None
            given.discard(name)
    if len(found) > 1:
        first, second, *_ = found
        action = "Pass one of the two"
        raise RoomierError(f"--{second}", found[second], f"cannot be combined with --{first}", action)
    return next(iter(found.values()), None)


def apply_deepspeed(config: Namespace, value: Any, machine: Machine) -> None:
    """Replace keywords of the Trainer with the settings of a DeepSpeed configuration and print a table of all keys.

    The strategy of the configuration is planned, unless ``--strategy`` selects another strategy.
    """
    defaults = {name: each.default for name, each in inspect.signature(Trainer.__init__).parameters.items()}
    ranks = {"devices": machine.devices_per_node, "num_nodes": machine.num_nodes}
    found = of_roomier({**config.trainer.as_dict(), **ranks, "deepspeed": value}, defaults)
    strategy = found["strategy"]
    if config.strategy is None:
        config.strategy = strategy["name"] if isinstance(strategy, dict) else strategy
    for name in found.keys() - ranks.keys():
        config.trainer[name] = found[name]
