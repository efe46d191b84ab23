"""Export of a model to TorchScript, which runs without Python."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Union, get_origin, get_type_hints

import torch
from torch import nn

from roomier.api.module import Module
from roomier.api.overrides import lightning_base
from roomier.checkpoint.export.compared import (
    MAX_DIFFERENCE,
    Example,
    check_same,
    example_of,
    quietly,
    ready_for_export,
)
from roomier.checkpoint.export.output_file import for_torch, replacing_file
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.core.torch_private import iter_tensors

_METHODS = ("script", "trace")


def export_torchscript(
    model: nn.Module,
    output: str | Path | None = None,
    *,
    method: Literal["script", "trace"] = "script",
    example_inputs: Any = None,
    max_difference: float = MAX_DIFFERENCE,
    may_exist: bool = False,
    **options: Any,
) -> torch.jit.ScriptModule:
    """Convert ``model`` to TorchScript and write it to the file ``output``, atomically.

    Args:
        output: new file; None writes no file.
        method: ``"script"`` compiles the code of ``forward``. ``"trace"`` records the operations of ``forward`` for one
            input and compares the outputs with the outputs of the model for other values and another batch size.
        example_inputs: arguments of ``forward``, which are optional with ``"script"``. If they are given, ``"script"``
            also compares the outputs.
        max_difference: largest accepted difference of an output, relative to the largest absolute value of the output
            or to 1, whichever is greater.
        may_exist: if True, replace an existing file.
        options: arguments of ``torch.jit.script`` or ``torch.jit.trace``.

    Raises:
        RoomierError: the model cannot be converted, the outputs differ, or ``output`` already exists.
    """
    if method not in _METHODS:
        raise RoomierError("method", method, "is unknown", did_you_mean(str(method), _METHODS))
    with ready_for_export(model, "torchscript") as plain:
        has_example = example_inputs is not None or getattr(plain, "example_input_array", None) is not None
        example = example_of(plain, example_inputs, "example_inputs") if has_example or method == "trace" else None
        with quietly() as caught:
            try:
                made = _made(plain, method, example, options)
            except Exception as error:
                raise _refused(plain, method, error) from error
        if example is not None:
            call, branches = (lambda each: list(iter_tensors(each.call(made)))), _branches(caught)
            check_same(plain, call, example, "torchscript", max_difference, hints=branches)
            for each in branches:
                notice(f"to torchscript: {each}. The outputs for other values are equal")
        if output is not None:
            with replacing_file(output, may_exist=may_exist) as target, quietly(), for_torch(target) as file:
                torch.jit.save(made, file)
    if any(issubclass(each.category, DeprecationWarning) and "torch.jit" in str(each.message) for each in caught):
        notice("TorchScript is deprecated in torch. roomier also supports its successors, torch.export and ONNX")
    script: torch.jit.ScriptModule = made
    return script


def _made(model: nn.Module, method: str, example: Example | None, options: dict[str, Any]) -> Any:
    with ExitStack() as stack:
        for part in model.modules():
            stack.enter_context(_seen_by_torchscript(part))
        if method == "script":
            return torch.jit.script(model, **options)
        assert example is not None
        by_name = {"example_kwarg_inputs": example.kwargs} if example.kwargs else {}
        return torch.jit.trace(model, example.args or None, **by_name, **options)  # type: ignore[no-untyped-call]


@contextmanager
def _seen_by_torchscript(part: nn.Module) -> Iterator[None]:
    """Make the attributes of ``part`` readable for TorchScript within the block.

    TorchScript reads the types of attributes from the class, but does not support the strings that ``from __future__
    import annotations`` creates, so the annotations are replaced by types. TorchScript also reads every property. Some
    properties access the Trainer, so the Trainer is replaced with an empty object.
    """
    shown: dict[str, Any] = {}
    if any(isinstance(each, str) for each in _annotations(part)):
        shown["__annotations__"] = {"training": bool, **_resolved(type(part))}  # TorchScript would ignore an empty dict
    if isinstance(part, Module) or lightning_base(type(part), Module) is not None:
        shown["_trainer"] = object()
    before = {name: vars(part)[name] for name in shown if name in vars(part)}
    vars(part).update(shown)
    try:
        yield
    finally:
        for name in shown:
            del vars(part)[name]
        vars(part).update(before)


def _annotations(part: nn.Module) -> list[Any]:
    return [each for cls in type(part).__mro__ for each in vars(cls).get("__annotations__", {}).values()]


def _resolved(cls: type) -> dict[str, Any]:
    try:
        hints = get_type_hints(cls)
    except Exception:  # annotations can contain names that are imported only for type checkers
        return {}
    plain = (bool, int, float, str, torch.Tensor)
    return {
        name: hint for name, hint in hints.items() if hint in plain or get_origin(hint) in (list, dict, tuple, Union)
    }


def _branches(caught: list[warnings.WarningMessage]) -> list[str]:
    """Return the code locations at which a trace recorded only one branch."""
    places = {
        f"{each.filename}:{each.lineno} depends on a value, but only one branch was recorded": None
        for each in caught
        if each.category.__name__ == "TracerWarning" and "might cause the trace to be incorrect" in str(each.message)
    }
    return list(places)[:3]


def _refused(model: nn.Module, method: str, error: Exception) -> RoomierError:
    text = " ".join(str(error).split())[:300]
    problem = f"cannot be {'scripted' if method == 'script' else 'traced'} ({type(error).__name__}: {text})"
    action = "Pass example_inputs and method='trace', which records the operations for one input, or export to onnx"
    if method == "trace":
        action = "Return only tensors, or tuples, lists and dicts of tensors, from forward, or pass method='script'"
    return RoomierError("to torchscript", type(model).__name__, problem, action)
