"""Selection of the runs whose memory is compared with a forecast, and the model shapes that are required for a
forecast."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn.parameter import is_lazy

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.api.wrapped import network_of
from roomier.callbacks import MemoryForecast
from roomier.core.device.resolve import resolve_device
from roomier.core.device.rng import rng_state, set_rng_state
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.planner.fake.shapes import shapes_of
from roomier.planner.memory.kinds import total_bytes
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.keywords.arguments import ordered

LARGE_BYTES = 2**30
"""Minimum number of bytes of model states on one rank for which a run's memory is compared with its forecast by
default."""
# with 64-true, 8 bytes each for the weight, the gradient, its bucket, two states and a margin
_MOST_BYTES_OF_A_PARAMETER = 48


def prepare_forecast(trainer: TrainerAttributes, module: Module) -> None:
    """Add a MemoryForecast to a fit if the forecast is useful, and store the shapes of ``module`` in
    ``trainer.shapes``.

    Call this function before the model is built. MemoryForecast and the report after an out-of-memory error read these
    shapes.
    """
    was_built = trainer.fitted is not None and trainer.fitted.module is module
    if not was_built:  # otherwise the shapes of the last fit are retained, because the built model has different shapes
        trainer.shapes = None
    # remove the callback of the previous fit
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, _ByDefault)]
    has_callback = any(isinstance(each, MemoryForecast) for each in trainer.callbacks)
    may_run_out = resolve_device(trainer.plan.parallel.accelerator).type != "cpu"
    is_short = bool(trainer.options.num_dev_batches) or not module.automatic_optimization
    # a tracked step is not compiled, so it requires more memory than other steps
    is_left_alone = is_short or trainer.plan.compile.enabled
    num_parameters = sum(each.numel() for each in network_of(module).parameters() if not is_lazy(each))
    may_be_large = num_parameters * _MOST_BYTES_OF_A_PARAMETER >= LARGE_BYTES
    may_be_added = not is_left_alone and not has_callback and (trainer.choice is not None or may_be_large)
    if not was_built and (has_callback or may_run_out or may_be_added):
        trainer.shapes = _shapes(module, tells=has_callback)
    shapes = trainer.shapes if may_be_added else None
    is_planned = trainer.choice is not None
    is_added = shapes is not None and (is_planned or _states_bytes(shapes, trainer.plan) >= LARGE_BYTES)
    if trainer.ranks.from_zero(is_added):  # rank 0 decides, because one rank may be unable to copy the model
        trainer.callbacks = ordered([*trainer.callbacks, _ByDefault()])


class _ByDefault(MemoryForecast):
    """The MemoryForecast that roomier adds by default."""

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        """Do not report that a short run has no forecast, because the user did not request a forecast."""


def _shapes(module: Module, *, tells: bool) -> Module | None:
    """Return a copy of ``module`` without values; None if the module cannot be copied."""
    state = rng_state()
    try:
        with torch.device("meta"):
            copied = shapes_of(module)
    except Exception as error:  # a model that cannot be copied can still be trained
        if tells:
            notice(
                f"MemoryForecast: no forecast is available, because {type(module).__name__} cannot be copied ({error})"
            )
        return None
    finally:
        set_rng_state(state)
    for parameter in copied.parameters():
        for name in ("page", "pages", "_paged_as"):  # values of a model that is created in parts
            parameter.__dict__.pop(name, None)
    return copied


def _states_bytes(shapes: Module, plan: Plan) -> int:
    """Return the peak size in bytes of the model states on one rank; 0 if unknown. Without a named optimizer, assume
    AdamW."""
    from roomier.planner.memory.predict import predict  # late import: loads torch's sharding modules

    optimizer = plan.optimizer
    if optimizer.name is None:
        plan = dataclasses.replace(plan, optimizer=dataclasses.replace(optimizer, name="adamw"))
    try:
        return total_bytes(predict(network_of(shapes), plan).peak.num_bytes)
    except Exception:  # the model may still be trainable; otherwise, building the model raises the error
        return 0
