"""How the step methods of a module are called."""

from __future__ import annotations

import inspect

from roomier.api.module import Module
from roomier.core.errors import RoomierError


def num_step_arguments(module: Module, name: str, num_given: int) -> int:
    """How many of the ``num_given`` arguments (batch, batch_idx, dataloader_idx) the method ``name`` takes.

    Raises:
        RoomierError: it takes none, asks for more, or for an iterator.
    """
    signature = inspect.signature(getattr(module, name))
    parameters = signature.parameters.values()
    if "dataloader_iter" in signature.parameters:
        problem = "takes the iterator of a loader, as Lightning may give it; here it gets one batch after another"
        raise RoomierError(name, str(signature), problem, f"Define it as {name}(self, batch, batch_idx)")
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return num_given
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not named or sum(p.default is p.empty for p in named) > num_given:
        arguments = ", ".join(("batch", "batch_idx", "dataloader_idx")[:num_given])
        action = f"Define it as {name}(self, {arguments})"
        raise RoomierError(name, str(signature), f"is called with ({arguments}) here", action)
    return min(len(named), num_given)
