"""A package outside of roomier, which adds an optimizer, a logger, an activation policy and a compression of gradients.
Its entry point is :func:`extend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from roomier import Logger, PlanError
from roomier.core.sharded import local_part
from roomier.loggers.by_name import LOGGERS
from roomier.plan import ParallelPlan, Plan
from roomier.plan.choices import (
    COMPRESSIONS,
    OPTIMIZERS,
    POLICIES,
    CompressionChoice,
    ImportedChoice,
    Kind,
    OptimizerChoice,
)
from roomier.plan.rules import RULES
from roomier.techniques.activation.copies import is_weight

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
    POLICIES["int8_activations"] = ImportedChoice(
        Kind.APPROXIMATE, "blocks save their activations in 8 bits", "roomier_example:int8_activations"
    )
    COMPRESSIONS["fp16"] = CompressionChoice(
        Kind.NEAR, "gradients are rounded to float16 before they are sent", "roomier_example:Fp16", num_passes=2
    )
    RULES.append(int8_requires_mixed_precision)


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


def int8_activations(num_blocks: int) -> list[Callable[[], saved_tensors_hooks]]:
    """Return the context of each block, in which autograd saves activations with 8 bits per element."""
    return [lambda: saved_tensors_hooks(_packed, _unpacked)] * num_blocks


def _packed(tensor: Tensor) -> Any:
    if is_weight(tensor) or not tensor.is_floating_point():
        return tensor
    scale = tensor.abs().amax().clamp(min=1e-12) / 127
    return (tensor / scale).round().to(torch.int8), scale


def _unpacked(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed[0] * packed[1]


def int8_requires_mixed_precision(plan: Plan) -> Iterator[PlanError]:
    """Reject 8 bits in a run that asks for 64 bits."""
    if plan.activation.policy == "int8_activations" and plan.precision.mode == "64-true":
        action = "Use precision='32-true', or another policy"
        yield PlanError("activation.policy", "int8_activations", "does not support precision '64-true'", action)


class Fp16:
    """Rounds gradients to float16 before DDP sends them."""

    def __init__(self, parallel: ParallelPlan) -> None:
        pass

    @staticmethod
    def sent_bytes(shape: torch.Size, itemsize: int, parallel: ParallelPlan) -> int:
        return 2 * math.prod(shape)

    def register(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, fp16_compress_hook)
