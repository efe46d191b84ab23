"""The step methods of a module, with the arguments that the loops pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from roomier.api.module import Module
from roomier.core.errors import RoomierError, TrainingError


def step_of(module: Module, name: str, num_given: int = 2) -> Callable[..., Any]:
    """Return a function that calls the method named ``name`` with the arguments among batch, batch_idx and
    dataloader_idx that the method accepts.

    If the method has the argument ``dataloader_iter``, as in Lightning, it receives an iterator over the batch of the
    step, which yields ``(batch, batch_idx, dataloader_idx)``. A step cannot read ahead in the loader, because a run
    could not resume at the position of the step.

    Args:
        module: module that defines the method.
        name: name of a step method, such as ``"training_step"``.
        num_given: number of arguments that the caller passes.

    Raises:
        RoomierError: the method accepts no argument, or requires more than ``num_given``.
    """
    step: Callable[..., Any] = getattr(module, name)
    signature = inspect.signature(step)
    parameters = signature.parameters.values()
    if "dataloader_iter" in signature.parameters:
        return partial(_read_by, step, name)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return step
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not named or sum(p.default is p.empty for p in named) > num_given:
        arguments = ", ".join(("batch", "batch_idx", "dataloader_idx")[:num_given])
        action = f"Define it as {name}(self, {arguments})"
        raise RoomierError(name, str(signature), f"is called with ({arguments})", action)
    if len(named) >= num_given:
        return step
    return lambda *arguments: step(*arguments[: len(named)])


def _read_by(step: Callable[..., Any], name: str, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
    batches = _one_batch(name, (batch, batch_idx, dataloader_idx))
    output = step(batches)
    if inspect.getgeneratorstate(batches) == inspect.GEN_CREATED:
        problem = "did not read the batch of its step from dataloader_iter, so the batch would be lost"
        raise TrainingError(name, "dataloader_iter", problem, "Call next(dataloader_iter) once in each step")
    return output


def _one_batch(name: str, item: tuple[Any, int, int]) -> Generator[Any, None, None]:
    yield item
    problem = "reads more than one batch from dataloader_iter in a step, so the run could not resume exactly"
    raise TrainingError(name, "dataloader_iter", problem, "Call next(dataloader_iter) once in each step")
