"""Validation of the stored state of a learning rate scheduler, before the state is loaded.

torch's ``load_state_dict`` writes every key of the state into the scheduler's ``__dict__``. A key such as ``get_lr``
would replace a method.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR

from roomier.core.forms import (
    Form,
    FormError,
    anything,
    count,
    fields,
    finite,
    flag,
    integer,
    item_of,
    like,
    list_of,
    number,
    one_of,
    optional,
)
from roomier.techniques.optim.schedule import SCHEDULES, Factor

_FACTOR = fields(
    {"name": one_of(*SCHEDULES), "num_steps": count, "warmup_steps": count, "min_lr_ratio": finite},
    others={"log_warmup": flag, "decay_steps": optional(count)},
)
_PARTS = "_schedulers"  # attribute of SequentialLR and ChainedScheduler
_MILESTONES = "_milestones"  # attribute of SequentialLR: the step at which each scheduler except the first starts
_FUNCTIONS = "lr_lambdas"  # contains objects with a state, or functions without a state


def check_scheduler(scheduler: Any, saved: Mapping[str, Any], groups: list[dict[str, Any]], place: str) -> None:
    """Check the stored state ``saved`` of ``scheduler``.

    Args:
        groups: the stored parameter groups of the scheduler's optimizer.
        place: path of ``saved``, for the error message.

    Raises:
        FormError: a value is malformed, or a key names an attribute of the class.
    """
    own = {key: value for key, value in (scheduler.state_dict() or {}).items() if not callable(value)}
    _check_names(scheduler, own, saved, place)
    if isinstance(scheduler, LRScheduler):
        rates = list_of(number, len(scheduler.base_lrs)) if hasattr(scheduler, "base_lrs") else anything
        known: dict[str, Form] = {"last_epoch": integer(-1), "_step_count": count, "base_lrs": rates, "_last_lr": rates}
        fields({key: known[key] for key in known.keys() & own.keys()}, others=anything)(saved, place)
    for key in own.keys() & saved.keys() - {_PARTS, _FUNCTIONS, "_last_lr"}:
        like(own[key])(saved[key], item_of(place, key))
    if _PARTS in own and _PARTS not in saved:
        raise FormError(place, saved, f"a mapping with the key {_PARTS!r}")
    if _MILESTONES in own.keys() & saved.keys():
        list_of(anything, len(own[_MILESTONES]))(saved[_MILESTONES], item_of(place, _MILESTONES))
    for key in {_PARTS, _FUNCTIONS} & own.keys() & saved.keys():
        objects = getattr(scheduler, key)
        list_of(anything, len(objects))(saved[key], item_of(place, key))
        for index, (each, state) in enumerate(zip(objects, saved[key], strict=True)):
            of_part = f"{item_of(place, key)}[{index}]"
            if key == _PARTS:
                fields({}, others=anything)(state, of_part)
                check_scheduler(each, state, groups, of_part)
            else:
                _check_function(each, state, of_part)
    _check_next_rate(scheduler, saved, groups, place)


def _check_names(owner: Any, own: Mapping[str, Any], saved: Mapping[str, Any], place: str) -> None:
    for key in saved.keys() - own.keys():
        if not isinstance(key, str) or hasattr(type(owner), key) or key in ("optimizer", "__dict__"):
            constraint = f"the name of a value, not of an attribute of {type(owner).__name__}"
            raise FormError(f"a key of {place}", key, constraint)


def _check_function(function: Any, saved: Any, place: str) -> None:
    if isinstance(function, Factor):
        return _FACTOR(saved, place)
    optional(fields({}, others=anything))(saved, place)
    if saved is not None:
        _check_names(function, getattr(function, "__dict__", {}), saved, place)
    return None


def _check_next_rate(scheduler: Any, saved: Mapping[str, Any], groups: list[dict[str, Any]], place: str) -> None:
    """Check that a copy of a torch scheduler can compute the next rate, or the current rate at the end of a
    schedule."""
    is_known = type(scheduler).__module__ == LRScheduler.__module__ and type(scheduler).get_lr is not LRScheduler.get_lr
    if not is_known or isinstance(scheduler, (LambdaLR, MultiplicativeLR)):  # their get_lr calls functions of the user
        return None
    copied = copy.copy(scheduler)
    copied.__dict__.update(copy.deepcopy(dict(saved)))
    copied.optimizer = SimpleNamespace(param_groups=copy.deepcopy(groups))
    copied._get_lr_called_within_step = True
    last_epoch = copied.last_epoch
    for copied.last_epoch in (last_epoch + 1, last_epoch):
        try:
            return list_of(number)(list(map(float, copied.get_lr())), place)
        except Exception as error:  # a malformed state can raise any error
            failed = error
    shown = {key: value for key, value in saved.items() if not key.startswith("_")}
    raise FormError(place, shown, f"a state of {type(scheduler).__name__} ({failed})") from failed
