"""Which runs are held against a forecast, and what is kept of a model before it is built so that they can be."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from roomier.api.forward import network_of
from roomier.api.module import Module
from roomier.callbacks import MemoryForecast
from roomier.core.device import resolve_device
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.rng import rng_state, set_rng_state
from roomier.plan import Plan
from roomier.trainer.keywords import ordered

if TYPE_CHECKING:
    from roomier.trainer import Trainer

LARGE_BYTES = 2**30
"""Model states of one rank from which on a run is held against its forecast by default."""
_MOST_BYTES_OF_A_PARAMETER = 48  # 64-true: weight, gradient, its bucket and two states in 8 bytes each, and 8 to spare


def prepare_forecast(trainer: Trainer, module: Module) -> None:
    """Before the model of a fit is built: add a MemoryForecast where there is to be one, and keep the model's shapes in
    ``trainer.shapes`` where they will be asked for: by that callback, or when a device runs out of memory."""
    was_built = (
        trainer.fitted is not None and trainer.fitted.module is module
    )  # what it was before is not seen any more
    if not was_built:
        trainer.shapes = None
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, _ByDefault)]  # of an earlier fit
    has_callback = any(isinstance(each, MemoryForecast) for each in trainer.callbacks)
    may_run_out = resolve_device(trainer.plan.parallel.accelerator).type != "cpu"
    is_short = bool(trainer.options.num_dev_batches) or not module.automatic_optimization
    num_parameters = sum(each.numel() for each in network_of(module).parameters() if not is_lazy(each))
    may_be_large = num_parameters * _MOST_BYTES_OF_A_PARAMETER >= LARGE_BYTES
    may_be_added = not is_short and not has_callback and (trainer.choice is not None or may_be_large)
    if not was_built and (has_callback or may_run_out or may_be_added):
        trainer.shapes = _shapes(module, tells=has_callback)
    if not may_be_added or trainer.shapes is None:
        return
    if trainer.choice is not None or _states_bytes(trainer.shapes, trainer.plan) >= LARGE_BYTES:
        trainer.callbacks = ordered([*trainer.callbacks, _ByDefault()])


class _ByDefault(MemoryForecast):
    """One that nobody asked for."""


def _shapes(module: Module, *, tells: bool) -> Module | None:
    """``module`` without values; None where it cannot be copied."""
    from roomier.planner.fake.shapes import shapes_of

    state = rng_state()
    try:
        with torch.device("meta"):
            copied = shapes_of(module)
    except Exception as error:  # whatever a model does when it is copied, it can be trained
        if tells:
            notice(f"MemoryForecast: {type(module).__name__} cannot be copied as shapes ({error})")
        return None
    finally:
        set_rng_state(state)
    for parameter in copied.parameters():
        for name in ("page", "pages", "_paged_as"):  # values of a model that is made in parts
            parameter.__dict__.pop(name, None)
    return copied


def _states_bytes(shapes: Module, plan: Plan) -> int:
    """Of one rank at their peak, by formula; as AdamW's where the optimizer is the module's own."""
    from roomier.memory.kinds import total_bytes
    from roomier.memory.predict import predict

    optimizer = plan.optimizer
    if optimizer.name is None:
        plan = dataclasses.replace(plan, optimizer=dataclasses.replace(optimizer, name="adamw"))
    try:
        return total_bytes(predict(network_of(shapes), plan).peak.num_bytes)
    except RoomierError:
        return 0  # its build will say what is wrong
