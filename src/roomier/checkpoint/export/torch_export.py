"""Export of the graph of a model with ``torch.export``, with a dynamic batch size."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roomier.checkpoint.export.compared import (
    MAX_DIFFERENCE,
    Compared,
    Example,
    check_same,
    example_of,
    quietly,
    ready_for_export,
)
from roomier.checkpoint.export.output_file import for_torch, replacing_file
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.torch_private import iter_tensors

_ANY_SIZE = "Use x.shape[0] or -1 instead of numbers, or export for this size only with dynamic_shapes={}"
_ACTIONS = {
    "data-dependent": "Use torch.where or torch.cond for value-dependent code, or export to torchscript with "
    "method='script', which supports branches",
    "specialized it to be a constant": _ANY_SIZE,
    "Constraints violated": _ANY_SIZE,
}


def export_torch(
    model: nn.Module,
    output: str | Path,
    sample: Any = None,
    *,
    dynamic_shapes: Any = None,
    max_difference: float = MAX_DIFFERENCE,
) -> Compared:
    """Write ``model`` to the file ``output`` (``.pt2``) for ``torch.export.load``, atomically.

    The outputs of the exported model are compared with the outputs of the model for the example, for other values, and,
    if ``dynamic_shapes`` is None, for another batch size.

    Args:
        output: new file.
        sample: arguments of ``forward``; see :func:`roomier.checkpoint.export.compared.example_of`.
        dynamic_shapes: argument of ``torch.export.export``; None makes the batch size dynamic, ``{}`` fixes all sizes.
        max_difference: largest accepted difference of an output, relative to the largest absolute value of the output
            or to 1, whichever is greater.

    Raises:
        RoomierError: the model cannot be exported as one graph for all inputs, the outputs differ, or ``output``
            already exists.
    """
    with ready_for_export(model, "torch-export") as plain, replacing_file(output) as target:
        example = example_of(plain, sample, "sample").with_batch()
        program = graph_of(plain, example, dynamic_shapes, "torch-export")
        with quietly():
            with for_torch(target) as file:
                torch.export.save(program, file)
            again = torch.export.load(target).module()
        call, is_fixed = (lambda each: list(iter_tensors(each.call(again)))), dynamic_shapes is not None
        done = check_same(plain, call, example, "torch-export", max_difference, fixed_shapes=is_fixed)
    notice(f"{output}: {done}")
    return done


def graph_of(model: nn.Module, example: Example, dynamic_shapes: Any, to: str) -> torch.export.ExportedProgram:
    """Return the result of ``torch.export.export`` for ``model``.

    Raises:
        RoomierError: the model cannot be exported as one graph for all inputs.
    """
    shapes = dynamic_shapes
    if dynamic_shapes is None:
        of_args, of_kwargs = example.dynamic_shapes()
        shapes = _by_name(model, of_args, of_kwargs)
    try:
        with quietly():
            return torch.export.export(model, example.args, example.kwargs, dynamic_shapes=shapes or None)
    except Exception as error:
        text = " ".join(str(error).split())
        action = next((action for mark, action in _ACTIONS.items() if mark in text), None)
        place = _place_in_model(str(error))
        problem = f"cannot be exported as one graph for all inputs ({type(error).__name__}: {text[:240]}{place})"
        default = "Change this code. `torch.export.draft_export(model, args)` reports all problems"
        raise RoomierError(f"to {to}", type(model).__name__, problem, action or default) from error


def _by_name(model: nn.Module, of_args: tuple[Any, ...], of_kwargs: dict[str, Any]) -> Any:
    # Positional and keyword arguments are combined in one mapping, in the order of the call.
    names = inspect.signature(model.forward).parameters
    return of_args if not of_kwargs else {**dict(zip(names, of_args, strict=False)), **of_kwargs}


def _place_in_model(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    places = [
        f"{line}: {following}"
        for line, following in zip(lines, [*lines[1:], ""], strict=True)
        if line.startswith('File "') and "site-packages" not in line
    ]
    return f"; {places[-1]}" if places else ""
