"""From the Trainer's keywords to what they make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roomier.api.callback import Callback
from roomier.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from roomier.core.errors import RoomierError, did_you_mean
from roomier.plan import Plan, plan_from_flags


def explain_unknown_keywords(init: Callable[..., None]) -> Callable[..., None]:
    """``init`` with an error for an unknown keyword that names the nearest known one."""
    known = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            raise RoomierError("Trainer", args[0], "takes no arguments without a name", "Write keywords: max_epochs=3")
        for name, value in kwargs.items():
            if name not in known:
                raise RoomierError(name, value, "Trainer has no such keyword", did_you_mean(name, known))
        init(self, **kwargs)

    return checked


def plan_of(given: Mapping[str, Any], init: Callable[..., None]) -> Plan:
    """The Plan that the keywords ``given`` to ``init`` ask for, or the one among them."""
    flags = {name: given[name] for name in inspect.signature(plan_from_flags).parameters}
    if given["plan"] is None:
        return plan_from_flags(**flags)
    defaults = inspect.signature(init).parameters
    for name, value in flags.items():
        if value != defaults[name].default:
            raise RoomierError(name, value, "plan= was given as well", "Say it in the plan, or pass keywords alone")
    return Plan.of(given["plan"])


def callbacks_of(given: Mapping[str, Any], enable_checkpointing: bool) -> list[Any]:
    """The callbacks that were ``given``, and those that are there by default."""
    callbacks = given["callbacks"]
    if callbacks is not None and not isinstance(callbacks, (Callback, list, tuple)):
        raise RoomierError(
            "callbacks", callbacks, "is not a list of callbacks", "Pass objects of subclasses of roomier.Callback"
        )
    found = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    has = {type(each) for each in found}
    if given["enable_progress_bar"] and ProgressBar not in has:
        found.append(ProgressBar())
    if given["enable_model_summary"] and ModelSummary not in has:
        found.append(ModelSummary())
    has_checkpoint = any(isinstance(each, ModelCheckpoint) for each in found)
    if has_checkpoint and not given["enable_checkpointing"]:
        raise RoomierError(
            "enable_checkpointing", False, "a ModelCheckpoint is among the callbacks", "Remove one of the two"
        )
    if enable_checkpointing and not has_checkpoint:
        found.append(ModelCheckpoint())
    return found


def ordered(callbacks: Sequence[Any]) -> list[Any]:
    # Checkpoints last: they hold the state of all others, which must have seen the event first.
    return sorted(callbacks, key=lambda each: isinstance(each, ModelCheckpoint))
