"""Number of arguments that the step methods of a module accept."""

from __future__ import annotations

import inspect

from roomier.api.module import Module
from roomier.core.errors import RoomierError


def num_step_arguments(module: Module, name: str, num_given: int) -> int:
    """Return how many of the arguments (batch, batch_idx, dataloader_idx) the method named ``name`` accepts.

    Args:
        module: module that defines the method.
        name: name of a step method, such as ``"training_step"``.
        num_given: number of arguments that are available.

    Raises:
        RoomierError: the method accepts no argument, requires more than ``num_given``, or requires an iterator.
    """
    signature = inspect.signature(getattr(module, name))
    parameters = signature.parameters.values()
    if "dataloader_iter" in signature.parameters:
        problem = "requires the iterator of a loader, but it is called with one batch at a time"
        raise RoomierError(name, str(signature), problem, f"Define it as {name}(self, batch, batch_idx)")
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return num_given
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not named or sum(p.default is p.empty for p in named) > num_given:
        arguments = ", ".join(("batch", "batch_idx", "dataloader_idx")[:num_given])
        action = f"Define it as {name}(self, {arguments})"
        raise RoomierError(name, str(signature), f"is called with ({arguments})", action)
    return min(len(named), num_given)
