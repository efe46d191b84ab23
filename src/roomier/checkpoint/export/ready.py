"""Preparation of a model for an export, and restoration of the model after the export."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO

import torch
from torch import nn

from roomier.api.module import Module
from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.techniques.adapters.layers import Adapted
from roomier.techniques.adapters.lora import merge_lora


@contextmanager
def ready_for_export(model: nn.Module, to: str) -> Iterator[nn.Module]:
    """Yield the module to export in place of ``model``, in evaluation mode, without gradients and without compilation.

    If ``model`` has adapters, the module is a copy with the adapters merged into its weights. The mode of each
    submodule is restored at the end of the block.

    Raises:
        RoomierError: the model is sharded or has no ``forward``.
    """
    if any(hasattr(each, "placements") for each in model.parameters()):
        problem = "must not be sharded"
        action = (
            "Export the checkpoint with `roomier export CHECKPOINT --to ...`, or load the checkpoint into a new model"
        )
        raise RoomierError(f"to {to}", type(model).__name__, problem, action)
    if inspect.getattr_static(type(model), "forward", None) in (nn.Module.forward, Module.forward):
        action = "Define forward(self, ...), which the exported model runs"
        raise RoomierError(f"to {to}", type(model).__name__, "has no forward method", action)
    model = torch_private.uncompiled(model)
    if any(isinstance(each, Adapted) for each in model.modules()):
        model = merge_lora(copy.deepcopy(model))
    modes = {part: part.training for part in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch_private.called_eagerly(model):
            yield model
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def quietly() -> Iterator[list[warnings.WarningMessage]]:
    """Suppress the log messages and the output of exporters, and yield the list of their warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("always")
            yield caught
    finally:
        logging.disable(before)
