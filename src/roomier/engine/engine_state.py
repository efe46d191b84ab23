"""The optimizer states in a checkpoint, by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from roomier.core.errors import CheckpointError
from roomier.engine.optimizer_form import check_values
from roomier.engine.optimizer_state import (
    check_optimizer,
    load_optimizer,
    optimizer_state,
    parameter_names,
    state_places,
)
from roomier.engine.updates import Updates

Saved = Mapping[str, Any]


def optimizer_states(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return the states of ``optimizers``. Tensors are not copied."""
    names = parameter_names(module)
    return [optimizer_state(optimizer, names) for optimizer in optimizers]


def check_optimizers(module: nn.Module, optimizers: Sequence[Optimizer], saved: Sequence[Saved]) -> None:
    """Check that ``saved`` can be loaded, before its tensors are read.

    Raises:
        CheckpointError: ``saved`` was not saved by the same optimizers.
    """
    if len(saved) != len(optimizers):
        problem = f"the checkpoint has {len(saved)} optimizers, but this run has {len(optimizers)}"
        action = "Configure the same optimizers as in the saved run"
        raise CheckpointError("optimizer", [type(optimizer).__name__ for optimizer in optimizers], problem, action)
    names = parameter_names(module)
    for index, (optimizer, state) in enumerate(zip(optimizers, saved, strict=True)):
        check_optimizer(optimizer, state, names)
        check_values(optimizer, state, names, f"optimizers[{index}]")


def optimizer_places(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    updates: Updates,
    saved: Sequence[Saved],
    *,
    is_spec: Callable[[Any], bool],
    unneeded: Any,
) -> list[dict[str, Any]]:
    """Return ``saved`` with an empty tensor in place of each tensor that will be read; see
    :meth:`roomier.api.engine.Engine.places`."""
    names = parameter_names(module)
    found = [
        state_places(optimizer, state, names, is_spec=is_spec, unneeded=unneeded, away=updates.away)
        for optimizer, state in zip(optimizers, saved, strict=True)
    ]
    states: dict[str, Any] = {name: state for each in found for name, state in each["state"].items()}
    updates.place({parameter: states[name] for parameter, name in names.items() if name in states})
    return found


def load_optimizers(
    module: nn.Module, optimizers: Sequence[Optimizer], updates: Updates, saved: Sequence[Saved]
) -> None:
    """Load ``saved`` into ``optimizers``.

    Raises:
        CheckpointError: ``saved`` was not saved by the same optimizers.
    """
    names = parameter_names(module)
    for optimizer, state in zip(optimizers, saved, strict=True):
        load_optimizer(optimizer, state, names, updates.away)
