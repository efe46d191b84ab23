"""torchmetrics objects in a checkpoint: what they gathered so far, which no ``state_dict`` of a module holds.

torchmetrics is never imported here: who has such an object has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.log import notice


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """The torchmetrics metrics among the submodules of ``module``, by qualified name."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    for each in module.modules():
        if isinstance(each, torchmetrics.MetricCollection):
            each.values(copy_state=False)  # metrics that share an update get the state of the one that did it
    return {name: each for name, each in module.named_modules() if isinstance(each, torchmetrics.Metric)}


def metric_states(module: nn.Module) -> dict[str, Any]:
    """``{name: {"state": {...}, "num_updates": n}}`` of the metrics that were updated since their last reset."""
    return {
        name: {"state": _mapped(metric.metric_state, _copied), "num_updates": metric.update_count}
        for name, metric in metrics_of(module).items()
        if metric.update_count
    }


def load_metric_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Put back what :func:`metric_states` gave; says so where a metric is no longer there."""
    metrics = metrics_of(module)
    for name, saved in states.items():
        if name not in metrics:
            notice(f"the checkpoint has a state of metric {name!r}, which this module does not have; it is left out")
            continue
        state = _mapped(saved["state"], partial(_moved, device=metrics[name].device))
        torch_private.load_metric_state(metrics[name], state, saved["num_updates"])


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _mapped(state: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    # A state is a tensor or a list of tensors.
    return {
        name: [change(each) for each in value] if isinstance(value, list) else change(value)
        for name, value in state.items()
    }
