"""Optimizers by name, with the parameter groups the field has settled on."""

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from roomier.core.errors import PlanError, did_you_mean
from roomier.optim.onebit_adam import OneBitAdam

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "onebit_adam": OneBitAdam,
}
_FUSED = {"adamw", "adam", "sgd"}


def make_optimizer(
    name: str,
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """The torch optimizer ``name`` over the parameters that require gradients.

    Weights with two dimensions or more decay; biases and the scales of norms (fewer than two) do not. AdamW, Adam
    and SGD (not of cut parameters) use torch's fused kernels: one pass over memory, and under a loss scale no wait
    for the device.

    Args:
        parameters: names and parameters; a tied parameter comes once.
        lr: None takes the optimizer's own default.
        options: further keyword arguments of the torch class (``betas``, ``eps``, ``momentum``, ...).

    Raises:
        PlanError: no parameter requires a gradient, or the class does not know an option.
    """
    kind = OPTIMIZERS[name]
    trainable = [(n, p) for n, p in parameters if p.requires_grad]
    if not trainable:
        raise PlanError("optimizer", name, "no parameter requires a gradient", "Unfreeze some, or train without fit")
    options = dict(options or {})
    known = set(inspect.signature(kind).parameters) - {"params"}
    for key in options:
        if key not in known:
            raise PlanError("optimizer", key, f"{kind.__name__} has no such option", did_you_mean(key, known))
    if lr is not None:
        options["lr"] = lr
    if name in _FUSED and not {"fused", "foreach", "differentiable"} & set(options):
        options["fused"] = all(_has_fused(name, p) for _, p in trainable)
    decayed = [p for _, p in trainable if p.dim() >= 2]
    others = [p for _, p in trainable if p.dim() < 2]
    if weight_decay is None:
        weight_decay = inspect.signature(kind).parameters["weight_decay"].default
    groups = [
        {"params": group, "weight_decay": decay} for group, decay in ((decayed, weight_decay), (others, 0.0)) if group
    ]
    return kind(groups, **options)


def _has_fused(name: str, parameter: nn.Parameter) -> bool:
    if name == "sgd" and not _is_whole(parameter):  # torch 2.13 has Adam's kernels alone for cut parameters
        return False
    return parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda", "mps")


def _is_whole(parameter: nn.Parameter) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")  # who cut a parameter has imported it
    return distributed is None or not isinstance(parameter, distributed.DTensor)
