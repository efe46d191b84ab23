"""Copies of modules that have shapes and no values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from roomier.api.module import Module


def shapes_of(module: Module, weight_dtype: torch.dtype | None = None) -> Module:
    """A copy of ``module`` without values, inside :func:`fake_world`.

    Args:
        weight_dtype: of its floating-point weights; None leaves them.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        is_converted = weight_dtype is not None and tensor.is_floating_point()
        dtype = weight_dtype if is_converted else tensor.dtype
        made = torch.empty(tensor.shape, dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = made
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if isinstance(part, Module):
            for name in ("log", "log_dict", "print"):
                part.__dict__[name] = _say_nothing
    if module.is_attached:
        copied.__dict__["_trainer"] = module.trainer  # its step may ask for the epoch, say
    return copied.train(module.training)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of what writes values down."""
