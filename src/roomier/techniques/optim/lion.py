"""Lion: an optimizer that uses the sign of a momentum and stores one number per weight.

[Note: Lion]
Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), Algorithm 2, with gradient ``g``:

    x = x - lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * x)
    m = beta2 * m + (1 - beta2) * g

Apart from weight decay, each step changes a weight by ``lr``, or not at all if the sign is 0. The paper therefore uses
a learning rate that is 3 to 10 times smaller than AdamW's, and a weight decay that is larger by the same factor
(section 5).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roomier.core.errors import RoomierError
from roomier.techniques.optim.local import NumberedOptimizer, first_element, local
from roomier.techniques.optim.rounding import empty_low_bits, noise_key, rounded_parts

SEED = 0  # seed for stochastic rounding; all runs can use the same seed


class Lion(NumberedOptimizer):
    """The Lion optimizer; see [Note: Lion]. Each rank updates its shard of each sharded parameter.

    Args:
        params: as for any optimizer; the parameters must be float32 or bfloat16.
        lr: learning rate, which is the step size of each weight.
        betas: decay rates of the mean whose sign is used, and of the stored momentum.
        weight_decay: decoupled weight decay, multiplied by ``lr`` in each step.
        weight_rounding: storage of bfloat16 weights: ``"split"``, ``"stochastic"`` or ``"nearest"`` (see
            ``rounding.py``). The momentum of these weights is float32.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        weight_rounding: str = "split",
    ) -> None:
        self._index = {}
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "weight_rounding": weight_rounding}
        super().__init__(params, defaults)

    def _update_all(self) -> None:
        for group, parameter in self._trained():
            self._update(group, parameter)

    def _update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise RoomierError("optimizer", "lion", "does not support sparse gradients", "Use sparse=False")
        state = self.state[parameter] or self._start(group, parameter)
        key = None
        if "step" in state:
            state["step"] += 1
            key = noise_key(SEED, int(state["step"]), self._index[parameter])
        low_bits = local(state["low_bits"]) if "low_bits" in state else None
        weight, gradient, momentum = local(parameter), local(parameter.grad), local(state["momentum"])
        first = first_element(parameter) if key is not None else 0
        parts = rounded_parts(weight, gradient, momentum, low_bits=low_bits, key=key, first=first)
        for value, own_gradient, own_momentum in parts:
            lion_(value, own_gradient, own_momentum, group["lr"], group["betas"], group["weight_decay"])

    def _start(self, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        dtype = torch.float32 if parameter.dtype is torch.bfloat16 else parameter.dtype
        state["momentum"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        if parameter.dtype is torch.bfloat16:
            if group["weight_rounding"] == "split":
                state["low_bits"] = empty_low_bits(parameter)
            elif group["weight_rounding"] == "stochastic":
                state["step"] = torch.zeros(())
        return state


def lion_(
    value: Tensor, gradient: Tensor, momentum: Tensor, lr: float, betas: tuple[float, float], weight_decay: float
) -> None:
    """Update ``value`` and ``momentum``, which have the same dtype, in place."""
    gradient = gradient.to(value.dtype)
    direction = momentum.lerp(gradient, 1 - betas[0]).sign_()
    if weight_decay:
        value.mul_(1 - lr * weight_decay)
    value.sub_(direction, alpha=lr)
    momentum.lerp_(gradient, 1 - betas[1])
