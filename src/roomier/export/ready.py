"""A model as it is to be exported: whole, plain, in evaluation mode; and as it was, afterwards."""

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

from roomier.adapters.layers import Adapted
from roomier.adapters.lora import merge_lora
from roomier.api.module import Module
from roomier.core import torch_private
from roomier.core.errors import RoomierError


@contextmanager
def ready_for_export(model: nn.Module, to: str) -> Iterator[nn.Module]:
    """What is to be exported in the place of ``model``: itself, in evaluation mode, without gradients and without what
    compiles it; a copy where it has adapters, with these in its weights. Every part gets back the mode it had.

    Raises:
        RoomierError: it is divided among ranks, or has no ``forward``.
    """
    if any(hasattr(each, "placements") for each in model.parameters()):
        problem = "is divided among the ranks"
        action = "Export its checkpoint: `roomier export CHECKPOINT --to ...`, or load that into a new model"
        raise RoomierError(f"to {to}", type(model).__name__, problem, action)
    if inspect.getattr_static(type(model), "forward", None) in (nn.Module.forward, Module.forward):
        action = "Define forward(self, ...), which is what others will call"
        raise RoomierError(f"to {to}", type(model).__name__, "has no forward", action)
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
    """Exporters tell pages of their own inner life; within it they are gathered."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as told, redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("always")
            yield told
    finally:
        logging.disable(before)
