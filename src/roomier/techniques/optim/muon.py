"""Muon for the matrices of blocks and AdamW for all other parameters, in one optimizer.

[Note: Muon]
Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". The update is the momentum of a matrix
after ``ns_steps`` rounds of a Newton-Schulz iteration in bfloat16, which sets all singular values close to 1. Option
names and defaults (except ``adjust_lr_fn``) are the same as in ``torch.optim.Muon``, and results are bitwise equal.
Because the singular values are near 1 for any gradient, Muon's learning rate has a different scale than AdamW's. The
default ``adjust_lr_fn="match_rms_adamw"`` scales updates to the size of AdamW's updates (Liu et al. 2025, "Muon is
Scalable for LLM Training", section 2.2), so that both can use the same learning rate and schedule.

[Note: sharded matrices]
The Newton-Schulz iteration requires the full matrix. The momentum stays sharded, and the updates are all-gathered one
matrix at a time, in the dtype of the gradient. Every rank runs the iteration on the full update and applies the rows of
its shard, so the result equals the result of a single rank. Compared to replicas (ddp), the iteration takes the same
time, but each matrix requires one additional all-gather.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from roomier.core.device.capability import capabilities_of
from roomier.core.sharded import is_sharded, local_rows
from roomier.techniques.optim.local import ShardOptimizer, local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(ShardOptimizer):
    """Muon for the matrices of blocks, and AdamW for the other parameters; see [Note: Muon].

    Args:
        params: groups; Muon updates the matrices of groups with ``"is_hidden": True``, and AdamW updates the other
            groups.
        lr: learning rate of Muon and AdamW.
        weight_decay: decoupled weight decay of Muon and AdamW, multiplied by ``lr`` in each step.
        momentum: decay rate of Muon's gradient average.
        nesterov: True to use Nesterov momentum.
        ns_coefficients: coefficients of the Newton-Schulz polynomial.
        ns_steps: number of iterations.
        adjust_lr_fn: ``"match_rms_adamw"``, or ``"original"`` (Jordan's factor, the square root of ``rows / columns``,
            at least 1).
        betas: decay rates of AdamW's moments.
        eps: term added to the square root of AdamW's second moment.
        adamw_lr: separate learning rate for AdamW; None selects ``lr``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_lr: float | None = None,
    ) -> None:
        given = [dict(group) for group in params]
        hidden = [group for group in given if group.get("is_hidden")]
        others = [group for group in given if not group.get("is_hidden")]
        settings = {"momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients}
        settings |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        if hidden:  # runs torch's checks of settings and shapes, with unsharded shapes
            torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay, **settings)  # type: ignore[arg-type]
        rest = lr if adamw_lr is None else adamw_lr
        devices = {each.device for group in others for each in group["params"]}
        is_fused = all("adamw" in capabilities_of(device).fused_optimizers for device in devices)
        self._adamw = AdamW(others, rest, betas, eps, weight_decay, fused=is_fused) if others else None
        shared = [] if self._adamw is None else self._adamw.param_groups
        super().__init__([{**settings, **group} for group in hidden] + shared, {"lr": lr, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # torch copies only the defaults, the state and the parameter groups
        others = [dict(group) for group in self.param_groups if not group.get("is_hidden")]
        self._adamw = AdamW(others) if others else None

    def _update_all(self) -> None:
        for group, parameter in self._trained():
            if group.get("is_hidden"):
                self._update(group, parameter)
        if self._adamw is not None:
            self._adamw.param_groups = [group for group in self.param_groups if not group.get("is_hidden")]
            self._adamw.state = self.state
            self._adamw.step()

    def _update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        momentum = state["momentum_buffer"]
        momentum.lerp_(parameter.grad, 1 - group["momentum"])
        update = parameter.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = update.full_tensor() if is_sharded(update) else update
        direction = orthogonal(whole, group["ns_coefficients"], group["ns_steps"])
        lr, weight, shape = group["lr"], local(parameter), parameter.shape
        is_like_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
        size = 0.2 * math.sqrt(max(shape)) if is_like_adamw else math.sqrt(max(1, shape[0] / shape[1]))
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(direction[local_rows(parameter)], alpha=-lr * size)


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int) -> Tensor:
    """Return a bfloat16 matrix with the singular vectors of ``matrix`` and singular values near 1."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
