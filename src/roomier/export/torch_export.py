"""``torch.export``: the graph of a model, whole, with any batch size."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.export.compared import MAX_DIFFERENCE, Compared, check_same, tensors_in
from roomier.export.examples import Example, example_of
from roomier.export.output_file import for_torch, replacing_file
from roomier.export.ready import quietly, ready_for_export

_ANY_SIZE = "Write it for any size, with x.shape[0] or -1 for numbers; or export for this one size: dynamic_shapes={}"
_ACTIONS = {
    "data-dependent": "Write what depends on values with torch.where or torch.cond; or export to torchscript with "
    "method='script', which keeps branches",
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
    """Write ``model`` as the file ``output`` (``.pt2``), which ``torch.export.load`` reads, whole or not at all.

    It is held against the model with the example, with other values, and with another batch size.

    Args:
        sample: what forward is called with: see :func:`roomier.export.examples.example_of`.
        dynamic_shapes: as ``torch.export.export`` takes it; None leaves the batch size open; ``{}`` fixes all.
        max_difference: of an output, over its largest value.

    Raises:
        RoomierError: the model has no graph that is the same for all inputs, the outputs differ, or ``output`` is there
            already.
    """
    with ready_for_export(model, "torch-export") as plain, replacing_file(output) as target:
        example = example_of(plain, sample, "sample").with_batch()
        program = graph_of(plain, example, dynamic_shapes, "torch-export")
        with quietly():
            with for_torch(target) as file:
                torch.export.save(program, file)
            again = torch.export.load(target).module()
        done = check_same(
            plain,
            lambda each: tensors_in(each.call(again)),
            example,
            fixed_shapes=dynamic_shapes is not None,
            max_difference=max_difference,
            to="torch-export",
        )
    notice(f"{output}: {done}")
    return done


def graph_of(model: nn.Module, example: Example, dynamic_shapes: Any, to: str) -> torch.export.ExportedProgram:
    """``torch.export.export`` of ``model``.

    Raises:
        RoomierError: it has none: says what is in the way.
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
        problem = f"cannot be written down as one graph for all inputs ({type(error).__name__}: {text[:240]}{place})"
        default = "Change what is named; `torch.export.draft_export(model, args)` reports all that is in the way"
        raise RoomierError(f"to {to}", type(model).__name__, problem, action or default) from error


def _by_name(model: nn.Module, of_args: tuple[Any, ...], of_kwargs: dict[str, Any]) -> Any:
    # Arguments by position and by name stand in one mapping, in the order they are passed.
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
