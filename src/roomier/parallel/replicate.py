"""DDP: every rank holds the whole model, and gradients are added up while the backward still runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from roomier.parallel.runner import StepRunner

POWERSGD_WARMUP_STEPS = 10
POWERSGD_RANK = 4


class Replicas:
    """A network that every rank holds: what the engine tells it at each step.

    torch's DDP averages over the ranks; the engine weighs its losses for a sum and multiplies by their number.

    Args:
        wire_dtype: in which gradients travel; None as they are.
        compression: ``"none"`` or ``"powersgd"``.

    Attributes:
        runner: calls steps.
    """

    def __init__(
        self, network: nn.Module, device: torch.device, *, wire_dtype: torch.dtype | None, compression: str
    ) -> None:
        # Unused parameters are found, not asked about: a model that skips some layers trains without a setting.
        self.runner = DistributedDataParallel(
            StepRunner(network),
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,  # else gradients stand in memory twice
            find_unused_parameters=True,
        )
        if compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=POWERSGD_RANK,
                start_powerSGD_iter=POWERSGD_WARMUP_STEPS,
            )
            self.runner.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif wire_dtype is torch.bfloat16:
            self.runner.register_comm_hook(None, default_hooks.bf16_compress_hook)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Before the forward of each micro-batch of a step."""
        self.runner.require_backward_grad_sync = is_last

    def release(self) -> None:
        """Nothing is gathered."""
