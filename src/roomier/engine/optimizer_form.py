"""Checks the stored settings and states of an optimizer before they are loaded.

For the optimizers of torch and roomier, a temporary optimizer of the same class takes one step with the stored
settings. The step updates a parameter on the meta device. This step accepts or rejects the settings and shows which
states the class requires. For other optimizers, only the structure of the values is checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.forms import FormError, anything, fields, item_of, like, tensor

_KNOWN = ("torch.optim", "roomier.techniques.optim")
_OF_KERNELS = ("params", "fused", "foreach", "capturable")  # settings that do not affect which states exist

States = dict[str, Any]


def check_values(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[nn.Parameter, str], place: str) -> None:
    """Check the settings and the states in ``saved``. The values of the tensors do not have to be read yet.

    Args:
        optimizer: the optimizer of this run.
        saved: state of an optimizer of the same class, with the same groups of parameters.
        names: the fully qualified name of each parameter.
        place: location of ``saved`` in the checkpoint, for error messages.

    Raises:
        FormError: a value is malformed.
    """
    for index, (group, stored) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        of_group = f"{place}.param_groups[{index}]"
        _check_settings(group, stored, of_group)
        expected: dict[tuple[Any, ...], States | None] = {}
        for parameter in group["params"]:
            state = saved["state"].get(names.get(parameter))
            if not state:
                continue
            kind = tuple(parameter.shape), parameter.dtype
            if kind not in expected:
                expected[kind] = _states_needed(optimizer, group, stored, parameter, of_group)
            _check_states(state, expected[kind], item_of(f"{place}.state", names[parameter]))


def _check_settings(group: Mapping[str, Any], stored: Mapping[str, Any], place: str) -> None:
    own = {key: like(value) for key, value in group.items() if key != "params"}
    required = {"lr": own["lr"]} if "lr" in own else {}
    fields(required, others=anything)(stored, place)
    for key in own.keys() & stored.keys():
        own[key](stored[key], item_of(place, key))
    if stored.get("capturable") and any(parameter.device.type == "cpu" for parameter in group["params"]):
        raise FormError(f"{place}.capturable", stored["capturable"], "false for parameters on the CPU")


def _states_needed(
    optimizer: Optimizer, group: Mapping[str, Any], stored: Mapping[str, Any], parameter: nn.Parameter, place: str
) -> States | None:
    """Return the states that ``optimizer`` has for ``parameter`` after a step, or None if these states cannot be
    determined.

    Raises:
        FormError: a step succeeds with the settings of ``group``, but fails with the settings of ``stored``.
    """
    make = type(optimizer)
    # optimizers whose states can change during training
    if not make.__module__.startswith(_KNOWN) or hasattr(make, "place"):
        return None
    try:
        states = _states_after_step(make, group, parameter)
    except Exception:  # the step requires more than a parameter, such as a process group or a closure
        return None
    settings = {**group, **stored}
    if not all(settings[key] is value or _is_same_plain(settings[key], value) for key, value in group.items()):
        try:
            states = _states_after_step(make, settings, parameter)
        except Exception as error:  # the step can raise any error
            shown = {key: value for key, value in stored.items() if key not in _OF_KERNELS}
            raise FormError(place, shown, f"settings of {make.__name__} ({error})") from error
    return states


def _is_same_plain(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, (bool, int, float, str, tuple)) and bool(one == other)


def _states_after_step(make: Callable[..., Any], settings: Mapping[str, Any], parameter: nn.Parameter) -> States:
    copy = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    copy.grad = torch.empty_like(copy)
    values = {key: _value_of(value) for key, value in settings.items() if key not in _OF_KERNELS}
    arguments = {key: values.pop(key) for key in values.keys() & inspect.signature(make).parameters.keys()}
    optimizer = make([{"params": [copy], **values}], **arguments)
    optimizer.step()
    return dict(optimizer.state[copy])


def _value_of(value: Any) -> Any:
    is_described = not isinstance(value, Tensor) and hasattr(value, "dtype")
    return torch.ones(value.shape, dtype=value.dtype) if is_described else value


def _check_states(state: Mapping[str, Any], expected: States | None, place: str) -> None:
    for key, own in (expected or {}).items():
        if key not in state:
            raise FormError(place, sorted(state), f"a mapping with the key {key!r}")
        form = tensor(shape=tuple(own.shape)) if isinstance(own, Tensor) else like(own)
        form(state[key], item_of(place, key))
