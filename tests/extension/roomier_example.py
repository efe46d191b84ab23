"""A package outside of roomier, which adds an optimizer and a logger. Its entry point is :func:`extend`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roomier import Logger
from roomier.core.sharded import local_part
from roomier.loggers.by_name import LOGGERS
from roomier.plan.choices import OPTIMIZERS, Kind, OptimizerChoice

ROWS: list[dict[str, float]] = []


def extend() -> None:
    OPTIMIZERS["signum"] = OptimizerChoice(
        Kind.EXACT,
        "Signum (Bernstein et al. 2018)",
        "roomier_example:Signum",
        cuda_bytes=28,
        cpu_bytes=28,
        num_operations=3,
        is_elementwise=True,
    )
    LOGGERS["rows"] = Rows


class Signum(Optimizer):
    """The sign of a momentum (Bernstein et al. 2018, arXiv 1802.04434, Algorithm 1)."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter, requires_grad=False)
                weight, mean = local_part(parameter.detach()), local_part(state["mean"])
                mean.lerp_(local_part(parameter.grad), 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(mean.sign(), alpha=group["lr"])
        return None


class Rows(Logger):
    """Logger that appends each row to ``ROWS``."""

    name = "rows"

    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int) -> None:
        ROWS.append({name: float(value) for name, value in metrics.items()})
