"""Conversion of a model to a Module, and from a Module back to the object that the user passed."""

from __future__ import annotations

from typing import Any

from torch import nn

from roomier.api.forward import ForwardModule
from roomier.api.lightning_module import LightningAdapter
from roomier.api.module import Module
from roomier.api.overrides import is_one, lightning_base
from roomier.core import torch_private
from roomier.core.errors import RoomierError


def as_module(model: nn.Module) -> Module:
    """Return ``model`` if it is a Module; otherwise wrap the LightningModule or ``nn.Module`` in a Module.

    Raises:
        RoomierError: ``model`` is not an ``nn.Module``, or it is a Module wrapped by ``torch.compile``.
    """
    if isinstance(model, Module):
        return model
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise RoomierError("model", model, "must be an instance, not a class", f"Pass {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise RoomierError("model", model, "must be an nn.Module", "Pass a roomier.Module or an nn.Module")
    if lightning_base(type(model), Module) is not None:
        return LightningAdapter(model)
    hidden = torch_private.uncompiled(model)
    if is_one(hidden, Module):
        problem = "is wrapped by torch.compile, which would bypass its training_step and hooks"
        action = "Pass the module itself and set Trainer(compile=True), or compile a submodule"
        raise RoomierError("model", type(hidden).__name__, problem, action)
    return ForwardModule(model)


def seen_by_user(module: Module) -> Any:
    """Return the object that callbacks and ``trainer.lightning_module`` receive.

    If the user passed a LightningModule, the function returns this LightningModule. While the LightningModule is
    attached, it has the methods of a Module.
    """
    return module.network if isinstance(module, LightningAdapter) else module
