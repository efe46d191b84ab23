"""TorchScript: a model as a program of its own, which runs without Python."""

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
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.export.compared import MAX_DIFFERENCE, check_same, tensors_in
from roomier.export.examples import Example, example_of
from roomier.export.output_file import for_torch, replacing_file
from roomier.export.ready import quietly, ready_for_export

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
    """``model`` in TorchScript, written as the file ``output`` where one is named, whole or not at all.

    Args:
        method: ``"script"`` translates the code of ``forward``; ``"trace"`` writes down what it does for one input, and
            is held against the model with other values and another batch size.
        example_inputs: what forward is called with. With ``"script"`` it is not needed; where it is there, the
            result is held against the model as well.
        options: for ``torch.jit.script`` or ``torch.jit.trace``.

    Raises:
        RoomierError: the model cannot be scripted, or does not do the same for all inputs.
    """
    if method not in _METHODS:
        raise RoomierError("method", method, "is unknown", did_you_mean(str(method), _METHODS))
    with ready_for_export(model, "torchscript") as plain:
        has_example = example_inputs is not None or getattr(plain, "example_input_array", None) is not None
        example = example_of(plain, example_inputs, "example_inputs") if has_example or method == "trace" else None
        with quietly() as told:
            try:
                made = _made(plain, method, example, options)
            except Exception as error:
                raise _refused(plain, method, error) from error
        if example is not None:
            check_same(
                plain,
                lambda each: tensors_in(each.call(made)),
                example,
                fixed_shapes=False,
                max_difference=max_difference,
                to="torchscript",
                hints=_branches(told),
            )
            for each in _branches(told):
                notice(f"to torchscript: {each}; with other values it was the same")
        if output is not None:
            with replacing_file(output, may_exist=may_exist) as target, quietly(), for_torch(target) as file:
                torch.jit.save(made, file)
    if any(issubclass(each.category, DeprecationWarning) and "torch.jit" in str(each.message) for each in told):
        notice(
            "TorchScript is deprecated in torch: what is new goes into torch.export and ONNX, which are here as well"
        )
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
    """TorchScript takes the types of attributes from the class, and knows none that ``from __future__ import
    annotations`` made a string of; and it reads every property, of which some ask the Trainer. Within it ``part`` has
    types as annotations, and a trainer that has nothing to tell."""
    shown: dict[str, Any] = {}
    if any(isinstance(each, str) for each in _annotations(part)):
        shown["__annotations__"] = {"training": bool, **_resolved(type(part))}  # an empty one would not count
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
    except Exception:  # names that are there for type checkers alone
        return {}
    plain = (bool, int, float, str, torch.Tensor)
    return {
        name: hint for name, hint in hints.items() if hint in plain or get_origin(hint) in (list, dict, tuple, Union)
    }


def _branches(told: list[warnings.WarningMessage]) -> list[str]:
    """Where a trace kept one of several ways."""
    places = {
        f"{each.filename}:{each.lineno} asks about a value, and one answer was kept": None
        for each in told
        if each.category.__name__ == "TracerWarning" and "might cause the trace to be incorrect" in str(each.message)
    }
    return list(places)[:3]


def _refused(model: nn.Module, method: str, error: Exception) -> RoomierError:
    text = " ".join(str(error).split())[:300]
    problem = f"cannot be {'scripted' if method == 'script' else 'traced'} ({type(error).__name__}: {text})"
    action = (
        "Pass method='trace' with example_inputs, which writes down what forward does for one input; or export to onnx"
    )
    if method == "trace":
        action = "Let forward return tensors, or tuples, lists and dicts of them; or pass method='script'"
    return RoomierError("to torchscript", type(model).__name__, problem, action)
