"""Makes ``save_pretrained`` reject models with adapters, because ``from_pretrained`` would load the files incorrectly.

``from_pretrained`` ignores names that the model does not have, such as ``lora_A``, and initializes missing weights,
such as quantized weights, with random values. The result would be a model without the trained parameters, and no error
would be raised.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from roomier.core.errors import RoomierError
from roomier.techniques.adapters.layers import Adapted

_NAME = "save_pretrained"


class SavesPlainModels:
    """Substitute for ``model.save_pretrained`` while the model has adapters.

    The substitute is an object instead of a closure, so that a copied or unpickled model has a separate substitute.

    Args:
        model: Hugging Face model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original ``save_pretrained``.

        Raises:
            RoomierError: the model has adapters, and no ``state_dict`` was passed.
        """
        kind: Any = type(self.model)
        if kwargs.get("state_dict") is None and any(isinstance(each, Adapted) for each in self.model.modules()):
            problem = "has adapters, which from_pretrained would not load from the saved files"
            action = (
                "Use one of three ways: merge the adapters with merge_lora(model) (from roomier.adapters import "
                "merge_lora), save only the adapters with export_adapter(model, folder) (from roomier.adapters import "
                "export_adapter), or export a checkpoint with `roomier export`"
            )
            raise RoomierError(_NAME, kind.__name__, problem, action)
        return kind.save_pretrained(self.model, *args, **kwargs)


def watch_saves(network: nn.Module) -> None:
    """Make the Hugging Face models in ``network`` reject calls of ``save_pretrained`` while they have adapters."""
    for part in network.modules():
        if callable(getattr(type(part), _NAME, None)) and _NAME not in vars(part):
            vars(part)[_NAME] = SavesPlainModels(part)


def unwatch_saves(network: nn.Module) -> None:
    """Restore the original ``save_pretrained``."""
    for part in network.modules():
        if isinstance(vars(part).get(_NAME), SavesPlainModels):
            del vars(part)[_NAME]
