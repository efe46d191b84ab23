"""Optimizer steps that are restricted to some of the optimizer's parameters.

The optimizer's own ``step`` computes the update. An optimizer is therefore supported if the update of each parameter
depends only on this parameter. All optimizers of ``torch.optim`` except LBFGS have this property.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from roomier.core import torch_private
from roomier.core.errors import TrainingError

Homes = dict[Tensor, tuple[Optimizer, dict[str, Any]]]
"""Mapping from each parameter to its optimizer and parameter group."""
Options = dict[int, dict[str, Any]]
"""Settings of parameter groups, with the ``id()`` of each group as key."""
Groups = list[tuple[dict[str, Any], list[Tensor]]]
"""Pairs of a parameter group and those of its parameters that are updated."""


def homes_of(optimizers: Iterable[Optimizer]) -> Homes:
    """Map each parameter to its optimizer and its group, in the order of the groups."""
    return {
        parameter: (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def step_only(homes: Homes, parameters: Sequence[Tensor]) -> None:
    """Update ``parameters`` with the ``step`` methods of their optimizers, without calling the optimizers' hooks.

    Raises:
        TrainingError: the step of an optimizer changes a setting of a parameter group.
    """
    for optimizer, groups in _groups_of(homes, parameters).items():
        with _narrowed(optimizer, groups), _unchanged(optimizer):
            torch_private.step_without_hooks(optimizer)


def check_no_step_hooks(optimizer: Optimizer, alternative: str) -> None:
    """Check that ``optimizer`` has no hooks that run before its step.

    Args:
        alternative: end of the error message, which names a setting that supports such hooks.

    Raises:
        TrainingError: ``optimizer`` has such a hook.
    """
    if torch_private.has_step_pre_hooks(optimizer):
        problem = "has a hook before its step (register_step_pre_hook), but parameters are updated outside its step"
        raise TrainingError("optimizer", type(optimizer).__name__, problem, f"Remove the hook, or {alternative}")


def _groups_of(homes: Homes, parameters: Iterable[Tensor]) -> dict[Optimizer, Groups]:
    found: dict[Optimizer, dict[int, tuple[dict[str, Any], list[Tensor]]]] = {}
    for parameter in parameters:
        optimizer, group = homes[parameter]
        found.setdefault(optimizer, {}).setdefault(id(group), (group, []))[1].append(parameter)
    return {optimizer: list(groups.values()) for optimizer, groups in found.items()}


@contextmanager
def _narrowed(optimizer: Optimizer, groups: Groups) -> Iterator[None]:
    """Restrict ``optimizer`` to the parameters of ``groups``.

    Without this restriction, each update of a block would loop over all parameters, so the time of a step would be
    quadratic in the number of parameters.
    """
    all_groups = optimizer.param_groups
    all_parameters = [group["params"] for group, _ in groups]
    optimizer.param_groups = [group for group, _ in groups]
    for group, parameters in groups:
        group["params"] = parameters
    try:
        yield
    finally:
        optimizer.param_groups = all_groups
        for (group, _), parameters in zip(groups, all_parameters, strict=True):
            group["params"] = parameters


@contextmanager
def _unchanged(optimizer: Optimizer) -> Iterator[None]:
    """Check that the step inside the context does not change the settings of the parameter groups.

    Raises:
        TrainingError: ``optimizer`` changed a number in a group. The change would affect the updates of other
            parameters.
    """
    before = [_numbers(group) for group in optimizer.param_groups]
    yield
    for group, earlier in zip(optimizer.param_groups, before, strict=True):
        now = _numbers(group)
        name = next((name for name in now if now[name] != earlier.get(name)), None)
        if name is not None:
            problem = (
                f"changes {name!r} of a parameter group in each call of step(), but step() is called for each block"
            )
            action = (
                "Use an optimizer that stores its state per parameter, or keep all states on the device and update "
                "parameters after backward (step_in_backward=False, offload=None)"
            )
            raise TrainingError("optimizer", type(optimizer).__name__, problem, action)


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    return {name: each for name, each in group.items() if isinstance(each, (int, float))}


def options_of(*optimizers: Optimizer) -> Options:
    """Return copies of the settings of all parameter groups, such as the learning rate."""
    return {id(group): _copied(group) for optimizer in optimizers for group in optimizer.param_groups}


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


@contextmanager
def with_options(homes: Homes, options: Options) -> Iterator[None]:
    """Use ``options`` as the settings of the parameter groups inside the context."""
    groups = {id(group): group for _, group in homes.values() if id(group) in options}
    current = {key: {name: value for name, value in group.items() if name != "params"} for key, group in groups.items()}
    for key, group in groups.items():
        group.update(options[key])
    try:
        yield
    finally:
        for key, group in groups.items():
            group.update(current[key])
