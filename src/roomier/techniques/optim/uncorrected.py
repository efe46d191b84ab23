"""Adam and AdamW without bias correction (``bias_correction=False`` in DeepSpeed and Apex), for torch's kernels.

The corrections ``1 - beta**step`` are exactly 1 for a large step count. Therefore, the states start with a step count
of 2**24, which a float32 counter does not exceed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from roomier.core import torch_private

LARGE_STEP = 2.0**24


class UncorrectedAdam(Adam):
    """:class:`torch.optim.Adam` without bias correction. The first updates are smaller than Adam's."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _step(self, Adam, closure)


class UncorrectedAdamW(AdamW):
    """:class:`torch.optim.AdamW` without bias correction. The first updates are smaller than AdamW's."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return _step(self, AdamW, closure)


def _step(optimizer: Optimizer, kind: type[Optimizer], closure: Callable[[], Any] | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state[parameter]:
                optimizer.state[parameter] = _empty_state(parameter, group)
    torch_private.step_without_hooks(optimizer, kind)
    return loss


def _empty_state(parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    on_device = group["fused"] or group["capturable"]  # the kernels then read the step count on the device
    state = {"step": torch.tensor(LARGE_STEP, device=parameter.device if on_device else None)}
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        state[name] = torch.zeros_like(parameter, requires_grad=False)
    return state
