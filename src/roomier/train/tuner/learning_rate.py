"""Functions that find and set the attribute of a module that contains its learning rate."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

from roomier.core.errors import RoomierError

NAMES = ("lr", "learning_rate")


def attribute_of(model: nn.Module, name: str = "") -> str:
    """Return the name of the attribute of ``model``, or of its ``hparams``, that contains its learning rate.

    Args:
        model: model that contains the attribute.
        name: name of the attribute. If ``name`` is empty, the attribute ``lr`` is used if it exists, otherwise
            ``learning_rate``.

    Raises:
        RoomierError: the attribute does not exist.
    """
    for each in [name] if name else NAMES:
        if hasattr(model, each) or each in _hparams(model):
            return each
    kind = type(model).__name__
    if name:
        problem = f"must be an attribute of {kind} or of its hparams"
        raise RoomierError("attr_name", name, problem, "Use the name of an existing attribute")
    action = (
        "Use self.lr or self.hparams.lr in configure_optimizers, name another attribute (auto_lr_find='my_lr'), or let "
        "the Trainer create the optimizer: Trainer(optimizer='adamw', auto_lr_find=True)"
    )
    raise RoomierError("auto_lr_find", kind, "requires an attribute lr or learning_rate", action)


def set_attribute(model: nn.Module, name: str, learning_rate: float) -> None:
    """Set the attribute ``name`` of ``model`` and the entry ``name`` of its ``hparams`` to ``learning_rate``. An
    attribute or entry that does not exist is not created."""
    hparams = _hparams(model)
    if name in hparams:
        hparams[name] = learning_rate
    if hasattr(model, name):
        setattr(model, name, learning_rate)


def _hparams(model: nn.Module) -> MutableMapping[str, Any]:
    found = getattr(model, "hparams", None)
    return found if isinstance(found, MutableMapping) else {}
