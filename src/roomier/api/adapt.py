"""Any model as a Module, and what its user knows it by."""

from __future__ import annotations

from typing import Any

from torch import nn

from roomier.api.forward import ForwardModule
from roomier.api.lightning import LightningAdapter
from roomier.api.module import Module
from roomier.api.overrides import is_one, lightning_base
from roomier.core import torch_private
from roomier.core.errors import RoomierError


def as_module(model: nn.Module) -> Module:
    """``model`` itself where it is a Module; a LightningModule or another ``nn.Module`` in a Module around it.

    Raises:
        RoomierError: it is no ``nn.Module``, or a Module that ``torch.compile`` hides.
    """
    if isinstance(model, Module):
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise RoomierError("model", model, "is a class", f"Make an object of it: {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise RoomierError("model", model, "is not an nn.Module", "Pass a roomier.Module or an nn.Module")
    if lightning_base(type(model), Module) is not None:
        return LightningAdapter(model)
    hidden = torch_private.uncompiled(model)
    if is_one(hidden, Module):
        problem = "torch.compile was called on the whole of it, which leaves its training_step and hooks uncalled"
        action = "Pass the module itself: Trainer(compile=True) compiles its blocks; or compile a network inside of it"
        raise RoomierError("model", type(hidden).__name__, problem, action)
    return ForwardModule(model)


def seen_by_user(module: Module) -> Any:
    """What callbacks and ``trainer.lightning_module`` get: the LightningModule itself, where it is one. It has the
    attributes of a Module that people use there."""
    return module.network if isinstance(module, LightningAdapter) else module
