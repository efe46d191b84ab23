"""Where a module keeps its learning rate, and how another is put there."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

from roomier.core.errors import RoomierError

NAMES = ("lr", "learning_rate")


def attribute_of(model: nn.Module, name: str = "") -> str:
    """The attribute of ``model``, or of its ``hparams``, that holds its learning rate.

    Args:
        name: what the user calls it; empty: the first of ``lr`` and ``learning_rate`` that is there.

    Raises:
        RoomierError: there is none.
    """
    for each in [name] if name else NAMES:
        if hasattr(model, each) or each in _hparams(model):
            return each
    kind = type(model).__name__
    if name:
        raise RoomierError("attr_name", name, f"is no attribute of {kind} or its hparams", "Name the one there is")
    action = (
        "Use self.lr or self.hparams.lr in configure_optimizers, name another attribute (auto_lr_find='my_lr'), or let "
        "the Trainer make the optimizer: Trainer(optimizer='adamw', auto_lr_find=True)"
    )
    raise RoomierError("auto_lr_find", kind, "has no attribute lr or learning_rate to set", action)


def set_attribute(model: nn.Module, name: str, learning_rate: float) -> None:
    """Put ``learning_rate`` wherever ``name`` is there: on ``model``, in its ``hparams``."""
    hparams = _hparams(model)
    if name in hparams:
        hparams[name] = learning_rate
    if hasattr(model, name):
        setattr(model, name, learning_rate)


def _hparams(model: nn.Module) -> MutableMapping[str, Any]:
    found = getattr(model, "hparams", None)
    return found if isinstance(found, MutableMapping) else {}
