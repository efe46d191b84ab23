"""Hugging Face's ``save_pretrained`` on a model with adapters: refused, since what it writes is not read back.

``from_pretrained`` leaves out names that its model has not, ``lora_A`` say, and draws anew the weights that it does not
find, as those in few bits: a model without what was trained, and no error.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from roomier.adapters.layers import Adapted
from roomier.core.errors import RoomierError

_NAME = "save_pretrained"


class SavesPlainModels:
    """Stands in the place of ``model.save_pretrained`` as long as there are adapters.

    An object and not a closure, so that a copy of the model, and one that was pickled, has its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            RoomierError: the model has adapters, and no ``state_dict`` says what to write.
        """
        kind: Any = type(self.model)
        if kwargs.get("state_dict") is None and any(isinstance(each, Adapted) for each in self.model.modules()):
            problem = "has adapters, and from_pretrained would read its files as a model without what was trained"
            action = (
                "Put the adapters into the weights first, merge_lora(model) (from roomier.adapters import merge_lora); "
                "or write them alone, export_adapter(model, folder) (from roomier.export.adapter import "
                "export_adapter); or make files of a checkpoint with `roomier export`"
            )
            raise RoomierError(_NAME, kind.__name__, problem, action)
        return kind.save_pretrained(self.model, *args, **kwargs)


def watch_saves(network: nn.Module) -> None:
    """Let the Hugging Face models in ``network`` refuse ``save_pretrained`` while they have adapters."""
    for part in network.modules():
        if callable(getattr(type(part), _NAME, None)) and _NAME not in vars(part):
            vars(part)[_NAME] = SavesPlainModels(part)


def unwatch_saves(network: nn.Module) -> None:
    """Give them their own ``save_pretrained`` back."""
    for part in network.modules():
        if isinstance(vars(part).get(_NAME), SavesPlainModels):
            del vars(part)[_NAME]
